"""Names of values: the shortest that is unambiguous, and the patterns that select them."""

from __future__ import annotations

import pytest

from kedge.sites.language import single
from kedge.sites.names import kind_meant, matching, names_at, site_named
from kedge.sites.select import Selector
from kedge.sites.site import Site


@pytest.mark.parametrize(
    ("sites", "names"),
    [
        ([Site("a", call=0)], ["a"]),
        ([Site("a", call=1)], ["a#1"]),
        ([Site("a", call=0), Site("a", call=1)], ["a#0", "a#1"]),
        (
            [Site("a", call=0), Site("a", "in", "x", 0), Site("a", "in", "x", 1)],
            ["a", "a#0:in[x]", "a#1:in[x]"],
        ),
        ([Site("a", leaf="0", call=0), Site("a", leaf="1", call=1)], ["a#0:out[0]", "a#1:out[1]"]),
        ([Site("a", call=0, op=("relu", 0))], ["a/relu"]),
        ([Site("a", call=0, op=("relu", 1))], ["a/relu#1"]),
        (
            [Site("a", call=0, op=("relu", 0)), Site("a", call=0, op=("relu", 1))],
            ["a/relu#0", "a/relu#1"],
        ),
        (
            [Site("a", call=0, op=("relu", 0)), Site("a", call=0, op=("add", 0))],
            ["a/relu", "a/add"],
        ),
        ([Site("", call=0), Site("", op=("add", 0), call=0)], [":out", "/add"]),
        ([Site("a"), Site("a", call=0)], ["a", "a#0"]),
        ([Site("z", "grad", call=0), Site("z", "acc", call=0)], ["z", "z:acc"]),
        ([Site("a.out.grad", "out.grad", call=0)], ["a.out.grad:out.grad"]),
    ],
)
def test_a_name_has_what_tells_it_from_the_others(sites: list[Site], names: list[str]) -> None:
    """Numbers of calls and operations stand there only if they are needed; every name is read back."""
    assert names_at(sites) == names
    usual = "grad" if sites[0].kind == "grad" else "out"
    assert [(s.path, s.kind, s.leaf) for s in (site_named(n, usual) for n in names)] == [
        (s.path, s.kind, s.leaf) for s in sites
    ]


@pytest.mark.parametrize(
    ("name", "kinds", "kind"),
    [
        ("a", {"out", "in"}, "out"),
        ("a", {"in"}, "in"),
        ("a", {"in", "out.grad"}, "out"),
        ("a:in", {"out"}, "in"),
        ("z", {"grad", "acc"}, "grad"),
        ("z", {"acc"}, "acc"),
        ("a", set(), "out"),
    ],
)
def test_the_kind_that_is_left_out_is_the_usual_one(name: str, kinds: set[str], kind: str) -> None:
    """It is ``out`` for modules and ``grad`` for tensors, if that is there, or else the only one there."""
    assert kind_meant(single(name), kinds) == kind


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("*", ["a", "b"]),
        ("a*:in", ["a:in[x]"]),
        ("**, **:in, !b", ["a", "a:in[x]"]),
        ("**/*", ["a/relu"]),
        ("**, **/*, !a", ["b"]),
        ("**, **/*, !a:out", ["b", "a/relu"]),
        ("a#1", []),
        ("b*#0", ["b"]),
        ("**{Linear}", ["b"]),
        ("c*", []),
    ],
)
def test_a_pattern_selects_names(text: str, found: list[str]) -> None:
    """As it selects sites of a model: outputs, unless it names something else."""
    names = ["a:in[x]", "a", "b", "a/relu"]
    types = {"b": ("Linear",)}
    selected, _ = matching(
        Selector(text), names, {"out", "in"}, lambda: lambda path: types.get(path, ())
    )

    assert sorted(selected) == sorted(found)
    assert selected == [name for name in names if name in found]


def test_what_an_operation_saves_is_of_its_module() -> None:
    """The operation may be left out, as where a model is hooked."""
    names = names_at([Site("a", "saved", "0", 0, ("mm", 0)), Site("a", "saved", "1", 0, ("mm", 1))])

    assert matching(Selector("*:saved"), names, {"saved"}, lambda: lambda _path: ())[0] == names
    assert (
        matching(Selector("*/mm#1:saved"), names, {"saved"}, lambda: lambda _path: ())[0]
        == names[1:]
    )


def test_types_are_asked_for_only_where_a_pattern_has_them() -> None:
    """Finding them out takes the model, which may be gone."""

    def gone() -> None:
        raise AssertionError

    assert matching(Selector("*"), ["a"], {"out"}, gone)[0] == ["a"]  # type: ignore[arg-type]
