"""Which sites of two recordings are the same site."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.compare.alignment.sites import Alignment, align
from kedge.compare.alignment.structure import MOST
from kedge.store.recording import Recording
from tests.compare.stories import NET, Layer, story

few = settings(max_examples=60, deadline=None, derandomize=True, database=None)

SEQUENTIAL = tuple(replace(layer, path=f"body.{i}", key=layer.path) for i, layer in enumerate(NET))


def paths(alignment: Alignment) -> dict[str, str]:
    """The modules of A and what they are in B."""
    return {same.a.path: same.b.path for same in alignment.modules}


def hows(alignment: Alignment) -> set[str]:
    """In which ways modules were aligned."""
    return {same.how for same in alignment.modules}


def left(alignment: Alignment) -> tuple[list[str], list[str]]:
    """The modules that one side has alone."""
    return [m.path for m in alignment.only_a], [m.path for m in alignment.only_b]


def chain(kinds: list[str], prefix: str = "body.") -> tuple[Layer, ...]:
    """Layers of some types, named by their numbers."""
    return tuple(
        Layer(f"{prefix}{i}", kind, (8, 8) if kind == "Linear" else ())
        for i, kind in enumerate(kinds)
    )


def test_the_same_names_are_the_same_modules() -> None:
    """A recording is aligned with itself by names alone, every site with itself."""
    run = story()
    alignment = align(run, run)

    assert all(same.a is same.b for same in alignment.sites)
    assert len(alignment.sites) == len(run.sites)
    assert hows(alignment) == {"name"}
    assert left(alignment) == ([], [])
    assert alignment.renames == ()


def test_sites_come_in_the_order_of_a_step() -> None:
    """Parameters come first, then the forward pass, the backward pass, the norm, the updates."""
    run = story()
    kinds = [same.kind for same in align(run, run).sites]

    assert kinds[:3] == ["param"] * 3
    assert kinds[-4:] == ["grad.norm", "update", "update", "update"]
    assert set(kinds[3:12]) == {"in", "out"}


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod", "_fsdp_wrapped_module"])
def test_what_wrappers_put_into_paths_is_left_out(wrapper: str) -> None:
    """A model inside DistributedDataParallel or torch.compile has the sites that it has alone."""
    alignment = align(story(), story(holders=[("", "Wrapper"), (wrapper, "Net")]))

    assert paths(alignment) == {
        "": wrapper,
        **{layer.path: f"{wrapper}.{layer.path}" for layer in NET},
    }
    assert hows(alignment) == {"wrapper"}
    assert left(alignment) == ([], [""])
    assert alignment.renames == (("", wrapper, 6),)


def test_a_wrapper_in_the_middle_of_a_path_is_left_out() -> None:
    """Blocks that are compiled or checkpointed one by one keep their sites."""
    wrapped = tuple(
        replace(n, path=f"{n.path}._checkpoint_wrapped_module", key=n.path) for n in NET
    )

    assert paths(align(story(), story(layers=wrapped)))["mid"] == "mid._checkpoint_wrapped_module"


def test_a_model_inside_another_is_found() -> None:
    """A module of the user's own around the model only puts a beginning before the paths, whichever side has it."""
    outer = story(holders=[("", "Trainer"), ("net", "Net")])
    alignment, other = align(story(), outer), align(outer, story())

    assert hows(alignment) == {"prefix"}
    assert paths(alignment)[""] == "net"
    assert {b: a for a, b in paths(other).items()} == paths(alignment)
    assert left(alignment) == ([], [""])
    assert (left(other)) == ([""], [])


def test_the_norm_of_a_wrapped_model_is_that_of_the_model() -> None:
    """The norm of all gradients stands at the outermost module, and is compared all the same."""
    alignment = align(story(), story(holders=[("", "Trainer"), ("net", "Net")]))

    assert [(s.a.site, s.b.site) for s in alignment.sites if s.kind == "grad.norm"] == [
        (":grad.norm", ":grad.norm")
    ]


def test_a_renamed_layer_is_found_by_its_place_and_type() -> None:
    """Another name alone hides nothing: type, parameters and place in the flow are the same."""
    renamed = tuple(replace(n, path="dense", key="mid") if n.path == "mid" else n for n in NET)
    alignment = align(story(), story(layers=renamed))

    assert paths(alignment)["mid"] == "dense"
    assert left(alignment) == ([], [])
    assert alignment.renames == (("mid", "dense", 1),)
    assert ("mid.weight:param", "dense.weight:param") in [
        (s.a.site, s.b.site) for s in alignment.sites
    ]


def test_names_that_all_changed_are_found_by_structure() -> None:
    """A model rewritten with other names is the same one, layer by layer."""
    renamed = tuple(replace(n, path=f"layer_{n.path}_new", key=n.path) for n in NET)
    alignment = align(story(), story(layers=renamed))

    assert [paths(alignment)[n.path] for n in NET] == [n.path for n in renamed]


@pytest.mark.parametrize("place", range(6))
def test_a_layer_more_moves_the_numbers_that_follow(place: int) -> None:
    """One more layer in a Sequential gives all that follow other names; they stay the same layers."""
    kinds = ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    more = [*kinds[:place], "Dropout", *kinds[place:]]
    alignment = align(story(layers=chain(kinds)), story(layers=chain(more)))

    moved = {f"body.{i}": f"body.{i + (i >= place)}" for i in range(5)}
    assert paths(alignment) == {"": "", **moved}
    assert left(alignment) == ([], [f"body.{place}"])


def test_a_longer_list_of_the_same_blocks_goes_on_at_its_end() -> None:
    """Where nothing tells which of equal layers is new, names decide: it is the last."""
    alignment = align(story(layers=chain(["Linear"] * 4)), story(layers=chain(["Linear"] * 5)))

    assert left(alignment) == ([], ["body.4"])
    assert hows(alignment) == {"name"}


def test_a_layer_of_another_type_takes_the_place_of_the_first() -> None:
    """ReLU in one run and GELU in the other, at the same place, are one changed module."""
    changed = tuple(
        replace(n, type="GELU", path="gelu", key="relu") if n.path == "relu" else n for n in NET
    )
    alignment = align(story(), story(layers=changed))
    same = next(same for same in alignment.modules if same.a.path == "relu")

    assert (same.b.path, same.how, same.kept) == ("gelu", "changed", False)


def test_a_layer_with_other_parameters_is_the_same_one_changed() -> None:
    """Another width keeps the name, and is reported."""
    wide = tuple(replace(n, weight=(16, 8), shape=(4, 16)) if n.path == "mid" else n for n in NET)
    alignment = align(story(), story(layers=wide))
    same = next(same for same in alignment.modules if same.a.path == "mid")

    assert (same.b.path, same.kept) == ("mid", False)


def test_a_parameter_that_no_optimizer_held_is_no_change() -> None:
    """Such a parameter is not recorded, but the module has it all the same."""
    sites = ["fc:out", {"site": "fc.weight:param", "owner": "fc", "shape": [4, 4]}]
    held = Recording.build(sites)
    events = [{"kind": "not-optimized", "root": 0, "unheld": ["fc.weight"]}]

    (same,) = align(held, Recording.build(sites[:1], events=events)).modules
    (lost,) = align(held, Recording.build(sites[:1])).modules

    assert same.kept
    assert not lost.kept


def test_layers_in_another_order_keep_their_names() -> None:
    """A name says more than the order of the data."""
    swapped = (NET[0], NET[1], NET[3], NET[2], NET[4])

    assert hows(align(story(), story(layers=swapped))) == {"name"}


def test_what_has_no_counterpart_is_left() -> None:
    """A layer of its own kind is not forced into a pair."""
    alignment = align(
        story(), story(layers=(*NET[:3], *NET[4:], Layer("norm", "LayerNorm", (8,), shape=(4, 5))))
    )

    assert left(alignment) == (["act"], ["norm"])


def test_models_with_nothing_in_common_have_no_pairs() -> None:
    """No pair is better than a wrong one."""
    other = Recording.build([{"site": "cell:out", "type": "LSTM", "shape": [3, 3]}])
    first = Recording.build([{"site": "conv:out", "type": "Conv2d", "shape": [2, 5, 5]}])

    assert align(first, other).sites == ()


def test_inputs_given_by_name_or_by_place_are_the_same() -> None:
    """Sites of one module whose texts differ are paired by kind and shape."""
    a = Recording.build(
        [{"site": "dec:in[mask]", "kind": "in", "shape": [2, 3]}, {"site": "dec:out", "shape": [2]}]
    )
    b = Recording.build(
        [{"site": "dec:in[1]", "kind": "in", "shape": [2, 3]}, {"site": "dec:out", "shape": [2]}]
    )

    assert [(s.a.site, s.b.site) for s in align(a, b).sites] == [
        ("dec:in[mask]", "dec:in[1]"),
        ("dec:out", "dec:out"),
    ]


def test_paths_with_special_characters_are_read() -> None:
    """A text in which characters of a path are escaped is still that of the path."""
    entry: dict[str, Any] = {"site": r"a\ b:out[0]", "path": "a b", "kind": "out", "type": "Odd"}
    run = Recording.build([entry])
    (same,) = align(run, run).sites

    assert same.module.a.part(same.a) == ":out[0]"


def test_very_many_changed_names_are_left_alone() -> None:
    """What would take long to align by structure is said to be not aligned."""
    kinds = [f"T{i % 7}" for i in range(MOST + 1)]
    ones, others = (
        [{"site": f"{p}{i}:out", "type": kind} for i, kind in enumerate(kinds)] for p in "ab"
    )

    assert align(Recording.build(ones), Recording.build(others)).sites == ()


kinds = st.lists(
    st.sampled_from(["Linear", "ReLU", "Dropout", "LayerNorm"]), min_size=1, max_size=8
)


@few
@given(kinds, kinds)
def test_no_module_is_in_two_pairs(a: list[str], b: list[str]) -> None:
    """For all pairs of models: every module is in one pair or left, and pairs by structure have the same type."""
    ones, others = story(layers=chain(a), steps=[]), story(layers=chain(b), steps=[])
    alignment = align(ones, others)
    modules_a = [same.a.path for same in alignment.modules] + left(alignment)[0]
    modules_b = [same.b.path for same in alignment.modules] + left(alignment)[1]

    assert sorted(modules_a) == sorted({site.owner for site in ones.sites})
    assert sorted(modules_b) == sorted({site.owner for site in others.sites})
    assert all(same.kept for same in alignment.modules if same.how == "structure")


@few
@given(kinds, st.integers(0, 8), st.sampled_from(["Linear", "ReLU", "Dropout", "LayerNorm"]))
def test_one_layer_more_leaves_one_module(a: list[str], place: int, kind: str) -> None:
    """For all models: with one layer more, all others are aligned with layers of their type."""
    b = [*a[:place], kind, *a[place:]]
    alignment = align(story(layers=chain(a), steps=[]), story(layers=chain(b), steps=[]))

    assert [len(side) for side in left(alignment)] == [0, 1]
    assert all(same.kept for same in alignment.modules)


@few
@given(kinds, st.permutations(range(8)))
def test_other_names_change_nothing(a: list[str], names: list[int]) -> None:
    """For all models: whatever the layers are called, each is aligned with itself."""
    ones = chain(a)
    others = tuple(
        replace(layer, path=f"n{names[i]}", key=layer.path) for i, layer in enumerate(ones)
    )
    alignment = align(story(layers=ones, steps=[]), story(layers=others, steps=[]))

    assert paths(alignment) == {
        "": "",
        **{one.path: other.path for one, other in zip(ones, others, strict=True)},
    }


def of_models(*models: tuple[str, str]) -> Recording:
    """Return the recording of models, each with its name and the prefix of its paths."""
    sites = []
    for number, (_, prefix) in enumerate(models):
        path = f"{prefix}.0".removeprefix(".")
        sites.append({"site": f"{path}:out", "type": "Linear", "root": number})
    roots = [{"name": name, "prefix": prefix} for name, prefix in models]
    return Recording.build(sites, roots=roots)


def test_models_in_another_order_are_matched_by_their_names() -> None:
    """The first model that is trained has no prefix: it is another one if that is not trained."""
    a = of_models(("Encoder", ""), ("Decoder", "Decoder"))
    b = of_models(("Decoder", ""), ("Encoder", "Encoder"))

    found = {(same.a.path, same.b.path) for same in align(a, b).modules}

    assert found == {("0", "Encoder.0"), ("Decoder.0", "0")}


def of_variables(*models: tuple[str, str]) -> Recording:
    """Make a recording of models by their class and their variable; without one, a model has the plain names."""
    sites = []
    roots = []
    for number, (kind, variable) in enumerate(models):
        roots.append({"name": variable or kind, "type": kind, "prefix": variable})
        for layer, inner in enumerate(("Linear", "ReLU", "Linear")):
            path = f"{variable}.{layer}".lstrip(".")
            sites.append({"site": f"{path}:out", "type": inner, "root": number})
    return Recording.build(sites, roots=roots)


@pytest.mark.parametrize(
    ("a", "b", "pairs"),
    [
        (  # each by its own name, whatever the order
            [("Sequential", "G"), ("Sequential", "D")],
            [("Sequential", "D"), ("Sequential", "G")],
            {"G": "G", "D": "D"},
        ),
        (  # renamed: by class and order
            [("Sequential", "G"), ("Sequential", "D")],
            [("Sequential", "netG"), ("Sequential", "netD")],
            {"G": "netG", "D": "netD"},
        ),
        (  # one of them renamed
            [("Sequential", "G"), ("Sequential", "D")],
            [("Sequential", "critic"), ("Sequential", "G")],
            {"G": "G", "D": "critic"},
        ),
        (  # a class each, in another order
            [("Maker", "G"), ("Judge", "D")],
            [("Judge", "critic"), ("Maker", "generator")],
            {"G": "generator", "D": "critic"},
        ),
        (  # before models had the names of their variables
            [("Sequential", ""), ("Sequential", "Sequential")],
            [("Sequential", "G"), ("Sequential", "D")],
            {"": "G", "Sequential": "D"},
        ),
    ],
)
def test_models_are_matched_by_their_variables_else_by_class_and_order(
    a: list[tuple[str, str]], b: list[tuple[str, str]], pairs: dict[str, str]
) -> None:
    """Of every model all layers are found, also where a variable was renamed."""
    expected = {}
    for one, other in pairs.items():
        for layer in range(3):
            expected[f"{one}.{layer}".lstrip(".")] = f"{other}.{layer}".lstrip(".")
    assert paths(align(of_variables(*a), of_variables(*b))) == expected
