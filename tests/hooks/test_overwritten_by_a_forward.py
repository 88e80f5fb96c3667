"""A recorded output that the forward's own code overwrites is right by default: it is copied when it is recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kedge


class Net(nn.Module):
    """Calls two layers, and a function on the value of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


class Method(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.relu_()
        return self.b(h)


class Chained(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu_())


class Functional(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x), inplace=True))


class Residual(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = self.a(x)
        out += x
        return self.b(out)


class Slice(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = self.a(x)
        out[0] = 0.0
        return self.b(out)


class View(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = self.a(x)
        flat = out.view(-1)
        flat.mul_(2.0)
        return self.b(out)


class Out(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            out = self.a(x)
            torch.mul(x, 2.0, out=out)
        return self.b(out)


class Loop(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return x


class Last(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.pair(x)
        h.sigmoid_()
        return self.b(h)


class Outer(nn.Module):
    """Overwrites what a module inside returns as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Returns()

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h *= 2.0
        return h


class Returns(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class Argument(Net):
    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return self.a(x)


CASES = [
    (Method, "a"),
    (Chained, "a"),
    (Functional, "a"),
    (Residual, "a"),
    (Slice, "a"),
    (View, "a"),
    (Out, "a"),
    (Loop, "blocks.0"),
    (Loop, "blocks.1"),
    (Last, "pair.1"),
    (Outer, "inner.a"),
    (Argument, ":in"),
]


@pytest.mark.parametrize(("make", "site"), CASES)
def test_the_first_version_is_kept(make: Callable[[], nn.Module], site: str) -> None:
    """As a hook by hand that clones at once would have it."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(3, 4)
    cloned = []
    path = site.removesuffix(":in")
    where = model.get_submodule(path)
    if site.endswith(":in"):
        where.register_forward_pre_hook(lambda module, args: cloned.append(args[0].clone()))
    else:
        where.register_forward_hook(lambda module, args, out: cloned.append(out.detach().clone()))
    with kedge.hook(model, site, kedge.record()) as acts:
        model(x.clone())
    assert torch.equal(acts[site], cloned[0])


def test_a_value_that_nobody_overwrites_is_no_copy() -> None:
    """Only the values that the source shows to be written to are copied."""
    model, seen = Residual(), []
    model.b.register_forward_hook(lambda module, args, out: seen.append(out.data_ptr()))
    with kedge.hook(model, "b", kedge.record()) as acts:
        model(torch.randn(3, 4))
    assert acts["b"].data_ptr() == seen[0]


def test_what_the_source_does_not_show_is_an_error_on_reading() -> None:
    """Never a wrong value."""
    model = Returns()
    with kedge.hook(model, "a", kedge.record()) as acts:
        model(torch.randn(3, 4)).detach().relu_()
    with pytest.raises(kedge.errors.Overwritten, match="copy=True"):
        acts["a"]


def test_a_module_two_below_a_sequential_is_recorded() -> None:
    """The outer one calls its own modules alone, and has none of the inner one's names."""
    model = nn.Sequential(nn.Linear(4, 4), Residual())
    with kedge.hook(model, "1.b", kedge.record()) as acts:
        model(torch.randn(3, 4))
    assert "1.b" in acts
