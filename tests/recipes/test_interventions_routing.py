"""Routing: the bits of a model that is written with the value at its new place, in forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.errors import InterventionError, NoSiteMatched
from kedge.recipes.interventions.routing import Route, route
from kedge.testing import assert_same_bits, assert_unhooked


class Chain(nn.Module):
    """Three linear layers; the output of the first is overwritten, and the first two may be in a checkpoint."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu_()).tanh_()

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.c(self.body(x))
        return self.c(checkpoint(self.body, x, use_reentrant=self.reentrant))


def by_hand(model: Chain, x: Tensor) -> Tensor:
    """Run it with the output of its first layer as that of the second."""
    return model.c(model.a(x).tanh())


def inputs(rows: int = 3) -> Tensor:
    """Make an input whose gradient is taken."""
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)).requires_grad_()


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_it_is_the_model_with_the_value_at_its_new_place(reentrant: bool | None) -> None:
    """To the bit, in several forwards before one backward, although the source is overwritten in place."""
    model, twin = Chain(reentrant), Chain()
    first, second = inputs(3), inputs(5)
    with route(model, "a", into="b"):
        outputs = [model(first), model(second)]
        (outputs[0].sum() + outputs[1].square().sum()).backward()
    x, y = first.detach().clone().requires_grad_(), second.detach().clone().requires_grad_()
    expected = [by_hand(twin, x), by_hand(twin, y)]
    (expected[0].sum() + expected[1].square().sum()).backward()

    assert_same_bits(outputs, expected)
    assert_same_bits([first.grad, second.grad], [x.grad, y.grad])
    torch.testing.assert_close(model.a.weight.grad, twin.a.weight.grad)
    torch.testing.assert_close(model.c.weight.grad, twin.c.weight.grad)
    assert model.b.weight.grad is None or not model.b.weight.grad.any()
    assert_unhooked(model)


def test_without_its_gradient_the_value_is_a_constant() -> None:
    """Nothing before it learns."""
    model, x = Chain(), inputs()
    with route(model, "a", into="b", gradient=False):
        output = model(x)
        output.sum().backward()
    assert_same_bits(output, by_hand(model, x))
    assert x.grad is None
    assert model.a.weight.grad is None
    assert model.c.weight.grad is not None


def test_a_function_of_both_values() -> None:
    """Gradients flow to both."""
    model, x = Chain(), inputs()
    with route(model, "a", into="b", by=torch.add):
        output = model(x)
    first = model.a(x)
    assert_same_bits(output, model.c((model.b(first.relu()) + first).tanh()))
    assert_same_bits(
        torch.autograd.grad(output.sum(), model.b.weight),
        torch.autograd.grad(model.c((model.b(first.relu()) + first).tanh()).sum(), model.b.weight),
    )


class Loop(nn.Module):
    """Calls its two layers in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.b(self.a(x + i)) for i in range(3)])


def test_each_call_gets_the_newest_value() -> None:
    """And a named call leads to all targets behind it."""
    model, x = Loop(), inputs()
    with route(model, "a", into="b"):
        assert_same_bits(model(x), torch.stack([model.a(x + i) for i in range(3)]))
    with route(model, "a#0", into="b#1, b#2"):
        found = model(x)
    assert_same_bits(found[0], model.b(model.a(x)))
    assert_same_bits(found[1:], model.a(x).expand(2, 3, 4))


def test_two_actions_in_a_session_used_again() -> None:
    """Values of an earlier block do not come back, although forwards are counted from 0 again."""
    way, model = Route(), Chain()
    for rows in (2, 3):
        x = inputs(rows)
        with kedge.session() as s:
            s.hook(model, "a", way.take)
            s.hook(model, "b", way.put)
            assert_same_bits(model(x), by_hand(model, x))


def test_what_cannot_be_routed_is_refused() -> None:
    """A source that comes later or not at all, that does not fit, has several values, or no gradient."""
    model, x = Chain(), inputs()
    with pytest.raises(InterventionError, match="b#0:out was reached before the source"):
        with route(model, "c", into="b"):
            model(x)
    with pytest.raises(InterventionError, match=r"\[3, 4\], which does not fit c"):
        with route(model, "a", into="c"):
            model(x)
    with pytest.raises(InterventionError, match='several values: "a:out", "b:out"; name one'):
        with route(model, "a, b", into="c", by=lambda value, _: value):
            model(x)
    with pytest.raises(NoSiteMatched):
        route(model, "a", into="nowhere")
    assert_unhooked(model)


class HalfFrozen(Chain):
    """The first layer runs without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            first = self.a(x)
        return self.c(self.b(first))


def test_a_gradient_that_cannot_flow_is_an_error() -> None:
    """Unless it is not asked for, or nothing is to be differentiated."""
    model, x = HalfFrozen(), inputs()
    with pytest.raises(InterventionError, match="without gradients"), route(model, "a", into="b"):
        model(x)
    with route(model, "a", into="b", gradient=False):
        assert_same_bits(model(x), model.c(model.a(x)))
    with torch.no_grad(), route(model, "a", into="b"):
        assert_same_bits(model(x), model.c(model.a(x)))


def test_a_failing_target_leaves_no_hook() -> None:
    """All or nothing."""
    model = Chain()
    with pytest.raises(InterventionError, match="by is a function"):
        route(model, "a", into="b", by="add")
    assert_unhooked(model)
