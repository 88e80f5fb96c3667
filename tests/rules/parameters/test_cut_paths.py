"""UNUSED-PARAM: parameters of modules that ran, but whose path to the loss is cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kedge.rules.parameters.unused_param import UnusedParam
from kedge.rules.rule import Finding
from kedge.store.recording import Recording


def found(
    modules: Mapping[str, tuple[str | None, bool]], silent: Mapping[str, str]
) -> list[Finding]:
    """Run the rule on modules, in the order in which they returned.

    Args:
        modules: Whether each has a graph, by the name of its node, and whether its output got a
            gradient.
        silent: The parameters without a gradient, with what ruled it out.
    """
    sites: list[dict[str, Any]] = []
    rows = []
    for name, (node, graded) in modules.items():
        sites.append(
            {"site": f"{name}:out", "path": name, "kind": "out", "owner": name, "node": node}
        )
        rows.append({"site": f"{name}:out", "step": 0, "count": 1, "sumsq": 1.0})
        if graded:
            sites.append(
                {"site": f"{name}:out.grad", "path": name, "kind": "out.grad", "owner": name}
            )
            rows.append({"site": f"{name}:out.grad", "step": 0, "count": 1, "sumsq": 1.0})
    entries = [
        {
            "site": f"{name}:param.grad",
            "fired": 0,
            "cause": "no observed backward pass reached it",
            "remedy": "use it",
            "ungraded": ungraded,
        }
        for name, ungraded in silent.items()
    ]
    recording = Recording.build(sites, rows, events=[{"kind": "ledger", "sites": entries}])
    return list(UnusedParam().check(recording))


CHAIN = {"a": ("Addmm", False), "b": ("Addmm", False), "c": ("Addmm", True), "": ("Addmm", True)}


def test_the_path_ends_between_the_last_without_and_the_first_with_a_gradient():
    """What is before the cut is one finding, that names the two modules, and does not say that it is unused."""
    (finding,) = found(CHAIN, {"a.weight": "", "b.weight": ""})

    assert (
        "the path from the loss ends after b: c after it got a gradient, and b got none"
        in finding.message
    )
    assert (finding.evidence.last, finding.evidence.next) == ("b", "c")
    assert "between b and c" in finding.remedy
    assert "in the forward" not in finding.remedy


@pytest.mark.parametrize(
    ("ungraded", "says", "remedy"),
    [
        ("no_grad inside", "b ran under no_grad in a forward with grad", "Remove torch.no_grad"),
        ("inference_mode inside", "b ran under inference_mode", "Remove torch.inference_mode"),
        (
            "cut checkpoint",
            "b ran in a reentrant checkpoint none of whose inputs requires",
            "use_reentrant=False",
        ),
        ("", "what b returned had no graph", "no_grad, detach()"),
    ],
)
def test_a_call_without_a_graph_ends_the_path_of_all_before_it(
    ungraded: str, says: str, remedy: str
):
    """What was seen at the call is said, of its own parameters and of those before it alike."""
    (finding,) = found({**CHAIN, "b": (None, False)}, {"a.weight": "", "b.weight": ungraded})

    assert finding.evidence.sites == ["a.weight:param.grad", "b.weight:param.grad"]
    assert says in finding.message
    assert remedy in finding.remedy


def test_frozen_modules_behind_the_cut_are_not_its_place():
    """They have no graph because their input has none: the cut is before them."""
    (finding,) = found({**CHAIN, "b": (None, False)}, {"a.weight": ""})

    assert (
        "ends after a: c after it got a gradient, and a got none; b, next, returned a value without a graph"
        in (finding.message)
    )


def test_a_parameter_beside_the_path_is_unused():
    """Its module's output has a gradient, that does not pass by it."""
    (finding,) = found(CHAIN, {"c.scale": ""})

    assert "c ran, and the gradient of its output does not pass there" in finding.message
    assert "Use it in the forward" in finding.remedy


def test_a_container_stands_for_what_is_in_it():
    """Its own parameters and those of its last part are one finding."""
    modules = {
        "a.x": ("Addmm", False),
        "a": ("Add", False),
        "b.x": ("Addmm", True),
        "b": ("Add", True),
        "": ("Add", True),
    }
    (finding,) = found(modules, {"a.scale": "", "a.x.weight": ""})

    assert (finding.evidence.last, finding.evidence.next) == ("a", "b.x")


def test_without_graphs_of_any_module_the_gradients_decide():
    """Compiled code shows no nodes."""
    (finding,) = found(
        {path: (None, graded) for path, (_, graded) in CHAIN.items()}, {"a.weight": ""}
    )

    assert (finding.evidence.last, finding.evidence.next) == ("b", "c")


def blocks(number: int, **odd: str) -> tuple[dict[str, tuple[str | None, bool]], dict[str, str]]:
    """Make blocks of which each loses the gradient of its attention: modules, and silent parameters."""
    modules: dict[str, tuple[str | None, bool]] = {}
    for i in range(number):
        modules[f"h.{i}.attn"] = ("Addmm", False)
        modules[f"h.{i}.{odd.get(f'b{i}', 'mlp')}"] = ("Addmm", True)
    silent = {f"h.{i}.attn.{name}": "" for i in range(number) for name in ("q", "k")}
    return {**modules, "": ("Addmm", True)}, silent


def test_a_cut_that_repeats_in_each_block_is_one_finding():
    """It names the parameters of all, the first place, and the others."""
    (finding,) = found(*blocks(12))

    assert len(finding.evidence.sites) == 24
    assert (finding.evidence.last, finding.evidence.next) == ("h.0.attn", "h.0.mlp")
    assert list(finding.evidence.again) == [f"h.{i}.attn" for i in range(1, 12)]
    assert finding.message.endswith(
        "ends after h.0.attn: h.0.mlp after it got a gradient, and h.0.attn got none; it ends so at 11 other places, "
        "too: h.1.attn, h.2.attn, h.3.attn and 8 more."
    )


def test_a_block_that_is_cut_elsewhere_is_a_finding_of_its_own():
    """The names behind the cut differ in more than a number."""
    one, other = found(*blocks(3, b1="norm"))

    assert (one.evidence.last, one.evidence.again) == ("h.0.attn", ("h.2.attn",))
    assert (other.evidence.last, other.evidence.next) == ("h.1.attn", "h.1.norm")
    assert other.evidence.again == ()


def test_a_single_cut_does_not_speak_of_others():
    """There is nothing to fold."""
    (finding,) = found(*blocks(1))

    assert finding.evidence.again == ()
    assert finding.message.endswith("and h.0.attn got none.")


def test_digits_inside_of_a_name_are_no_number_of_a_block():
    """``layer1`` and ``layer2`` may be anything."""
    modules: dict[str, tuple[str | None, bool]] = {}
    for name in ("layer1", "layer2"):
        modules |= {f"{name}.a": ("Addmm", False), f"{name}.b": ("Addmm", True)}
    findings = found({**modules, "": ("Addmm", True)}, {"layer1.a.w": "", "layer2.a.w": ""})

    assert [finding.evidence.last for finding in findings] == ["layer1.a", "layer2.a"]
