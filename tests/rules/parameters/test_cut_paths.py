"""UNUSED-PARAM: parameters of modules that ran, but whose path to the loss is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.rules.parameters.unused_param import UnusedParam
from kedge.rules.rule import Finding
from kedge.store.recording import Recording


def found(
    modules: Mapping[str, tuple[str | None, bool]],
    silent: Mapping[str, str],
    given: Mapping[str, tuple[str | None, str]] | None = None,
) -> list[Finding]:
    """Run the rule on modules, in the order in which they returned.

    Args:
        modules: Whether each has a graph, by the name of its node, and whether its output got a
            gradient.
        silent: The parameters without a gradient, with what ruled it out.
        given: The node and the dtype of what some modules were given.
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
    for name, (node, dtype) in (given or {}).items():
        sites.append({"site": f"{name}:in", "kind": "in", "node": node, "dtype": dtype})
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


FLOAT = "float32"


def test_a_module_that_was_given_no_graph_is_behind_the_cut():
    """Nothing came to it from the module before, whose result had a graph: no checkpoint can be the reason."""
    (finding,) = found(CHAIN, {"a.weight": "", "b.weight": ""}, {"c": (None, FLOAT)})

    assert "no gradient came to what lies before c" in finding.message
    assert "b returned a value with a graph" in finding.message
    assert "the path from the loss ends between b and c" in finding.message
    assert "Look between b and c for detach(), .data" in finding.remedy
    assert "checkpoint" not in finding.remedy
    assert finding.entry()["evidence"]["given"] == "no graph"


def test_a_module_that_was_given_a_graph_shows_that_the_path_goes_past_the_one_before():
    """Then the result of that is cut off where it is used, or is not used."""
    (finding,) = found(CHAIN, {"b.weight": ""}, {"c": ("Relu", FLOAT)})

    assert "the path from the loss goes past b" in finding.message
    assert "Look where the result of b is used" in finding.remedy


def test_one_input_with_a_graph_is_enough():
    """Others of the same module are indices or masks."""
    (finding,) = found(
        CHAIN,
        {"b.weight": ""},
        {"c": ("Relu", FLOAT), "c[1]": (None, FLOAT), "c[2]": (None, "int64")},
    )

    assert finding.evidence.given == "graph"


def test_whole_numbers_pass_no_gradient_on():
    """As where the largest output is looked up in a table; this may also be another input."""
    (finding,) = found(CHAIN, {"b.weight": ""}, {"c": (None, "int64")})

    assert "c, after b, was given whole numbers alone" in finding.message
    assert "If b makes these numbers (argmax" in finding.remedy


def test_a_frozen_module_that_returned_no_graph_for_one_is_the_end():
    """It was given a value with a graph."""
    (finding,) = found({**CHAIN, "b": (None, False)}, {"a.weight": ""}, {"b": ("Relu", FLOAT)})

    assert "b, after a, was given a value with a graph and returned one without" in finding.message
    assert "Look in b and around its call" in finding.remedy


def test_a_frozen_module_that_was_given_no_graph_is_behind_the_end():
    """The path ends before it."""
    (finding,) = found({**CHAIN, "b": (None, False)}, {"a.weight": ""}, {"b": (None, FLOAT)})

    assert "ends between a and b" in finding.message
    assert (finding.evidence.last, finding.evidence.next) == ("a", "c")


def test_first_values_from_an_evaluation_say_nothing():
    """There is no graph anywhere at first, whatever the training has."""
    modules = {**CHAIN, "b": ("Addmm", False), "c": (None, True)}
    (finding,) = found(modules, {"b.weight": ""}, {"c": (None, FLOAT)})

    assert "given" not in finding.entry()["evidence"]
    assert "the path from the loss ends after b" in finding.message


class Net(nn.Module):
    """Three layers, the path between which a function cuts."""

    def __init__(self, cut: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        return self.head(self.second(self.cut(self.first(x))).relu())


def trained(tmp_path: Path, net: nn.Module, *, of: int | None = None) -> list[Finding]:
    """Return what the rule finds in a short training; the loss takes one of several outputs."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with kedge.watch(tmp_path / "net.kedge", force=True):
        for _ in range(4):
            optimizer.zero_grad()
            outputs = net(torch.randn(8, 4))
            if of is not None:
                outputs = outputs[of]
            outputs.square().sum().backward()
            optimizer.step()
    return list(UnusedParam().check(Recording.open(tmp_path / "net.kedge")))


def under_no_grad(value: Tensor) -> Tensor:
    """Return a value that is computed without a graph."""
    with torch.no_grad():
        return value.relu()


CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": Tensor.detach,
    "data": lambda value: value.data.relu(),
    "numbers": lambda value: torch.tensor(value.tolist()),
    "no_grad": under_no_grad,
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_between_two_modules_is_placed(cut: str, tmp_path: Path):
    """With the lines that call the modules on both sides, in a program that ran."""
    (finding,) = trained(tmp_path, Net(CUTS[cut]))

    assert finding.evidence.sites == ["first.weight:param.grad", "first.bias:param.grad"]
    assert (finding.evidence.last, finding.evidence.next) == ("first", "second")
    assert finding.evidence.given == "no graph"
    assert "first is called at" in finding.message
    assert "test_cut_paths.py:" in finding.message


def test_a_path_that_is_whole_is_no_finding(tmp_path: Path):
    """All layers get gradients."""
    assert trained(tmp_path, Net(torch.relu)) == []


class Branch(nn.Module):
    """A layer beside the path from the loss."""

    def __init__(self, *, used: bool) -> None:
        super().__init__()
        self.stem, self.aux, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, without the gradient of the layer in any case."""
        x = self.stem(x)
        aside = self.aux(x)
        if self.used:
            x = x + aside.detach()
        return self.head(x.relu())


@pytest.mark.parametrize("used", [True, False])
def test_a_branch_beside_the_path_is_not_said_to_end_it(used: bool, tmp_path: Path):
    """Both a branch that is detached where it joins and one that is not used at all are possible."""
    (finding,) = trained(tmp_path, Branch(used=used))

    assert finding.evidence.sites == ["aux.weight:param.grad", "aux.bias:param.grad"]
    assert "the path from the loss goes past aux" in finding.message


class TwoHeads(nn.Module):
    """Two layers with an output each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both outputs."""
        return self.one(x) * 2, self.other(x) * 2


def test_an_output_that_the_loss_does_not_use_is_named(tmp_path: Path):
    """It is one of several, and the others got gradients."""
    (finding,) = trained(tmp_path, TwoHeads(), of=0)

    assert finding.evidence.sites == ["other.weight:param.grad", "other.bias:param.grad"]
    assert "of what that returned, :out[1] got no gradient" in finding.message
    assert "detach" not in finding.remedy


def test_a_first_output_that_the_loss_does_not_use_is_beside_the_path(tmp_path: Path):
    """The next module got a gradient, and was given the input of the model, not a result of the first."""
    (finding,) = trained(tmp_path, TwoHeads(), of=1)

    assert finding.evidence.sites == ["one.weight:param.grad", "one.bias:param.grad"]
    assert "other, next, was given an input of the model and got a gradient" in finding.message
    assert "Look where the result of one is used" in finding.remedy
