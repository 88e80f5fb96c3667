"""NAN-BORN where a value is taken by more than one: whose backward spoiled its gradient, and when that cannot be known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.rule import Finding
from kedge.store.recording import Recording
from tests.rules.scenes import made_at

pytestmark = pytest.mark.usefixtures("without_copies")

Values = Callable[[Tensor], Tensor]


def distance(x: Tensor) -> Tensor:
    """Return a norm of zeros, whose slope is infinite."""
    return (x - x).square().sum(-1, keepdim=True).sqrt()


class Root(nn.Module):
    """A module whose own backward makes NaN."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same values."""
        return x + distance(x)


class Weighted(nn.Module):
    """A module whose own backward makes NaN, of its parameter's gradient too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return some values times the weight."""
        return Root()(x * self.weight)


class Linear(nn.Linear):
    """Named as PyTorch's own, but it does more than add products."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what PyTorch's would."""
        return super().forward(x + distance(x))


class Net(nn.Module):
    """Two modules in a row, and how they are put together."""

    def __init__(
        self, b: nn.Module, put: Callable[[Net, Tensor], Tensor], c: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.a, self.b, self.put = nn.Linear(4, 4), b, put
        if c is not None:
            self.c = c

    def forward(self, x: Tensor) -> Tensor:
        """Put them together."""
        return self.put(self, self.a(x))


class Pair(nn.Module):
    """A container that hands its input to a module inside it, and to an operation of its own."""

    def __init__(self, inner: nn.Module, beside: Values | None = None) -> None:
        super().__init__()
        self.inner, self.beside = inner, beside

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        return self.inner(x) if self.beside is None else self.inner(x) + self.beside(x)


def linear() -> nn.Module:
    """A linear map."""
    return nn.Linear(4, 4)


def only(model: nn.Module, folder: Path, head: Values = lambda y: y) -> Finding:
    """Train two steps, every one looked at, and run the rule, which finds one thing."""
    torch.manual_seed(0)
    watching = kedge.watch(folder / "run.kedge", every=1, budget=None)
    watching.tell = lambda text: None
    with watching:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(2):
            optimizer.zero_grad()
            head(model(torch.randn(8, 4))).square().mean().backward()
            optimizer.step()
    (finding,) = NanBorn().check(Recording.open(folder / "run.kedge"))
    return finding


#: What the program does, what is found, the module, and which others it may have been.
CASES = {
    # The value is taken by one alone, and so it is its backward.
    "in the module": (lambda: Net(Root(), lambda net, h: net.b(h)), ("backward, seen", "b", [])),
    "in a module in a row": (
        lambda: Net(nn.Sequential(Root(), linear()), lambda net, h: net.b(h)), ("backward, seen", "b.0", []),
    ),
    "in a module that is named as PyTorch's": (lambda: Net(Linear(4, 4), lambda net, h: net.b(h)), ("backward, seen", "b", [])),
    "inside a container that has an operation beside": (
        lambda: Net(nn.Sequential(linear(), Root(), linear()), lambda net, h: net.b(h) + h), ("backward, seen", "b.1", []),
    ),
    # A parameter's gradient is made inside its module, whatever else takes the value.
    "in the module, beside an operation, with its weight": (
        lambda: Net(Weighted(), lambda net, h: net.b(h) + h), ("backward, seen", "b", []),
    ),
    # The value is taken by an operation of the container too.
    "in the module, beside an operation": (lambda: Net(Root(), lambda net, h: net.b(h) + h), ("backward, among", "b", [""])),
    "beside a norm": (
        lambda: Net(nn.LayerNorm(4), lambda net, h: net.b(h) + (h * 0).abs().pow(0.5)), ("backward, among", "b", [""]),
    ),
    "beside a linear map of one's own": (lambda: Net(Linear(4, 4), lambda net, h: net.b(h) + distance(h)), ("backward, among", "b", [""])),
    "beside two modules": (
        lambda: Net(nn.LayerNorm(4), lambda net, h: net.b(h) + net.c(h) + distance(h), nn.LayerNorm(4)),
        ("backward, among", "b", ["c", ""]),
    ),
    "on the way into a later module": (
        lambda: Net(nn.LayerNorm(4), lambda net, h: net.c(net.b(h) + distance(h)), linear()), ("backward, among", "b", [""]),
    ),
    "on the way into a module that is called first": (
        lambda: Net(nn.LayerNorm(4), lambda net, h: net.c(h + distance(h)) + net.b(h), linear()), ("backward, among", "b", [""]),
    ),
    "in a container that was given the value": (
        lambda: Net(Pair(nn.LayerNorm(4), distance), lambda net, h: net.b(h)), ("backward, among", "b.inner", ["b"]),
    ),
    "in the program, of what was returned beside": (
        lambda: Net(nn.LayerNorm(4), lambda net, h: (net.b(h), h)), ("backward, inferred", None, []),
    ),
    # Of two modules that take it, either may be.
    "in one of two modules": (
        lambda: Net(nn.Softplus(), lambda net, h: torch.cat([net.b(h), net.c(h)]), Root()), ("backward, among", "b", ["c", ""]),
    ),
    # A sum of products of small numbers makes nothing, so it was the operation.
    "beside a linear map": (lambda: Net(linear(), lambda net, h: net.b(h) + distance(h)), ("backward, inferred", "", [])),
    "beside an activation": (lambda: Net(nn.ReLU(), lambda net, h: net.b(h) + distance(h)), ("backward, inferred", "", [])),
    "into a linear map": (lambda: Net(linear(), lambda net, h: net.b(h + distance(h))), ("backward, between", "a", [])),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_one_that_spoiled_it_is_among_those_that_are_named(name, tmp_path):
    """Where one alone can have been, it is named alone."""
    make, (how, module, also) = CASES[name]
    head = (lambda y: y[0] + distance(y[1])) if name.startswith("in the program") else lambda y: y

    found = only(make(), tmp_path, head)

    assert (made_at(found), found.evidence.module, found.evidence.also) == (
        how,
        module,
        also,
    )
    sure = {
        "backward, seen": 0.9,
        "backward, among": 0.7,
        "backward, inferred": 0.9 if module is None else 0.8,
        "backward, between": 0.8,
    }[how]
    assert found.confidence == (1.0 if "with its weight" in name else sure)


def test_a_finding_says_what_cannot_be_known(tmp_path):
    """Both are named with the line in the container's forward, and the remedy is for both."""
    found = only(Net(nn.LayerNorm(4), lambda net, h: net.b(h) + distance(h)), tmp_path)

    assert found.message.startswith(
        "a:out.grad was the first gradient to contain NaN (32 of 32 elements), at step 0; the gradient that arrived at b "
        "(LayerNorm) was finite: its backward made it, or that of an operation in Net's own forward that takes the same value. "
        "b (LayerNorm) is called at tests/rules/nonfinite/test_nonfinite_beside.py:"
    )
    assert found.remedy.startswith(
        "Look, there and in the forward around it, for an operation whose derivative is infinite"
    )


def test_an_operation_beside_a_linear_map_is_not_blamed_on_it(tmp_path):
    """The remedy is about the operation, not about the size of gradients."""
    found = only(Net(linear(), lambda net, h: net.b(h) + distance(h)), tmp_path)

    assert (
        "the gradient that arrived at b (Linear) was finite, and too small to overflow there: the backward of an "
        "operation in Net's own forward made it, or of one on its output, which takes the same value. b (Linear) is called at"
        in found.message
    )
    assert found.remedy.startswith(
        "Look in the forward of Net for an operation whose derivative is infinite, beside the modules"
    )
    assert "Scale the loss down" not in found.remedy


def test_a_linear_map_that_can_overflow_is_not_excused(tmp_path):
    """Where weights are so large that a sum of products leaves the range, it is the map."""
    model = Net(linear(), lambda net, h: net.b(h))
    with torch.no_grad():
        model.b.weight.fill_(1e30)

    found = only(model, tmp_path, lambda y: y * 1e-30 + (y - y.detach()) * 1e10)

    assert (made_at(found), found.evidence.module) == ("backward, seen", "b")
    assert "Scale the loss down" in found.remedy


def test_several_that_may_have_been_are_told_apart(tmp_path):
    """A module that takes the value is named as such, and a container by its own forward."""
    found = only(
        Net(nn.Softplus(), lambda net, h: torch.cat([net.b(h), net.c(h)]), Root()), tmp_path
    )

    assert (
        "its backward made it, or that of c (Root), which takes the same value, or that of an operation in Net's own forward "
        "that takes the same value" in found.message
    )
