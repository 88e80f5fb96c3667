"""A parameter whose gradient arrives in parts: of a reentrant checkpoint, and of its other uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.errors import EditError, PartialGradient

NAME = "a.weight:param.grad"


class Tied(nn.Module):
    """Layers that share one weight, of which some run in checkpoints.

    Args:
        inside: For each layer in order, whether it runs in a reentrant checkpoint.
        reentrant: Whether the checkpoints are reentrant.
    """

    def __init__(self, *inside: bool, reentrant: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.reentrant = inside, reentrant
        self.a = nn.Linear(3, 3)
        self.others = nn.ModuleList(nn.Linear(3, 3) for _ in inside[1:])
        for other in self.others:
            other.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        for inside, layer in zip(self.inside, [self.a, *self.others], strict=True):
            x = torch.tanh(
                checkpoint(layer, x, use_reentrant=self.reentrant) if inside else layer(x)
            )
        return x


LAYOUTS = [
    (True, False),
    (False, True),
    (True, True),
    (True, False, True),
    (False, True, True, False),
]


def backward(model: nn.Module, times: int = 1) -> Tensor:
    """The gradient of the shared weight after some backward passes."""
    torch.manual_seed(1)
    for _ in range(times):
        x = torch.randn(4, 3, requires_grad=True)
        model(x).pow(2).sum().backward()
    return model.a.weight.grad


@pytest.mark.parametrize("inside", LAYOUTS)
def test_the_gradient_is_whole(inside: tuple[bool, ...]) -> None:
    """Recorded, measured, and seen last by a function is the sum of all parts, in one backward; and no bit changes."""
    plain, model, seen = backward(Tied(*inside)), Tied(*inside), []
    with kedge.session() as s:
        grads = s.hook(model, NAME, kedge.record())
        stats = s.hook(model, NAME, kedge.measure())
        tensor = s.hook({"w": model.a.weight}, kedge.record())
        s.hook(model, NAME, lambda grad, event: seen.append((grad.clone(), event.backward)))
        found = backward(model)
    assert torch.equal(found, plain)
    assert torch.allclose(grads[NAME], plain)
    assert torch.allclose(tensor["w"], plain)
    assert torch.allclose(seen[-1][0], plain)
    assert {number for _, number in seen} == {0}
    assert len(grads.records(NAME)) == 1
    assert (stats[NAME].calls, stats[NAME].count) == (1, 9)
    assert stats[NAME].rms == pytest.approx(float(plain.square().mean().sqrt()))


@pytest.mark.parametrize("inside", LAYOUTS)
@pytest.mark.parametrize(
    "edit",
    [
        lambda grad: grad.clamp(-0.5, 0.5),
        lambda grad: grad * 0.5,
        torch.zeros_like,
        lambda grad: grad / grad.norm(),
    ],
)
def test_an_edit_is_one_of_the_whole(
    inside: tuple[bool, ...], edit: Callable[[Tensor], Tensor]
) -> None:
    """What is accumulated is the edit of the whole gradient, in each of several backward passes."""
    whole = [backward(Tied(*inside, reentrant=False))]
    both = Tied(*inside, reentrant=False)
    whole.append(backward(both, 2) - whole[0])
    model = Tied(*inside)
    with kedge.hook(model, NAME, edit):
        found = backward(model, 2)
    assert torch.allclose(found, edit(whole[0]) + edit(whole[1]), atol=1e-5)


def test_gradients_of_several_backwards_are_each_whole() -> None:
    """Where .grad is not empty, the parts are known from the backward before."""
    model, single = Tied(True, False), Tied(True, False)
    with kedge.hook(model, NAME, kedge.record(keep=None)) as grads:
        backward(model, 3)
    found = [record.value for record in grads.records(NAME)]
    torch.manual_seed(1)
    for each in found:
        single.zero_grad()
        single(torch.randn(4, 3, requires_grad=True)).pow(2).sum().backward()
        assert torch.allclose(each, single.a.weight.grad, atol=1e-6)


def test_a_part_whose_others_are_lost_is_reported() -> None:
    """Hooked while .grad holds an earlier gradient, the first backward shows parts, and a warning says so."""
    model = Tied(True, False)
    backward(model)
    with kedge.hook(model, NAME, kedge.record(keep=None)) as grads:
        with pytest.warns(PartialGradient, match="is a part of this gradient.*use_reentrant=False"):
            backward(model)
        assert len(grads.records(NAME)) == 2
        backward(model)
        assert len(grads.records(NAME)) == 3


def test_an_edit_of_a_part_whose_others_come_unforeseen_is_an_error() -> None:
    """An autograd function that runs a backward of its own without declaring it is reported at the edit."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
            ctx.layer = layer
            ctx.save_for_backward(x)
            return layer(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.layer(x)
            torch.autograd.backward(out, grad)
            return x.grad, None

    layer = nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    with kedge.session() as s:
        s.hook({"w": layer.weight}, kedge.scale(0.5))
        with pytest.raises(EditError, match="arrives in parts.*use_reentrant=False"):
            layer(Own.apply(x, layer)).sum().backward()


def test_what_has_accumulated_is_recorded_once() -> None:
    """:param.acc has the last value of .grad in a backward, not each."""
    model = Tied(True, False)
    with kedge.hook(model, "a.weight:param.acc", kedge.record()) as grads:
        found = backward(model)
    assert torch.equal(grads["a.weight:param.acc"], found)


def test_backwards_are_counted_as_the_program_calls_them() -> None:
    """The backward of a checkpoint has the number of the one around it, whichever fires first."""
    model = Tied(True, False, True)
    with kedge.session() as s:
        s.hook(model, "**:param.grad", kedge.record())
        backward(model, 3)
        numbers = [event.backward for event, _ in s.timeline()]
    assert sorted(set(numbers)) == [0, 1, 2]
    assert numbers == sorted(numbers)


def test_a_retained_graph_is_differentiated_twice() -> None:
    """Two backward passes of one loss are two, each with the whole gradient, with and without a gradient given."""
    for given in (None, torch.tensor(1.0)):
        layer = nn.Linear(3, 1)
        loss = layer(torch.ones(2, 3)).sum()
        with kedge.hook(nn.ModuleDict({"a": layer}), NAME, kedge.record(keep=None)) as grads:
            loss.backward(given, retain_graph=True)
            loss.backward(given)
        assert [record.event.backward for record in grads.records(NAME)] == [0, 1]
        assert torch.equal(grads[NAME], torch.full((1, 3), 2.0))
