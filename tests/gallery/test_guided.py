"""The gallery's M16: guided backpropagation cuts negative gradients at every ReLU, however it is written."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kedge
from kedge.errors import NothingCut
from kedge.recipes import guided_backprop
from kedge.testing import assert_hooks_restored, assert_same_bits
from tests.gallery.models import VGG16, Affine, Functional, Witness, resnet18


class ByHand(torch.autograd.Function):
    """A ReLU whose backward is written by hand."""

    @staticmethod
    def forward(ctx, x):
        out = x.clamp(min=0)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return torch.where((out > 0) & (grad > 0), grad, torch.zeros_like(grad))


class Rewritten(nn.Module):
    """The module to put in a ReLU's place."""

    def forward(self, x: Tensor) -> Tensor:
        return ByHand.apply(x)


def rewritten(model: nn.Module) -> nn.Module:
    """Copy a model, with every ReLU module replaced; one that is used several times stays one."""
    twin = copy.deepcopy(model)
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.ReLU):
                setattr(parent, name, Rewritten())
    return twin


def gradient(model: nn.Module, x: Tensor, entry: int) -> Tensor:
    """The gradient of one output, as one would write it."""
    y = x.clone().requires_grad_()
    return torch.autograd.grad(model(y)[:, entry].sum(), y)[0]


CASES = {
    "modules": (Affine, (4, 100)),
    "modules and ReLU6": (Witness, (4, 2)),
    "one in-place instance used many times": (resnet18, (2, 3, 48, 48)),
    "in-place modules": (VGG16, (1, 3, 32, 32)),
}


@pytest.mark.parametrize(("build", "shape"), CASES.values(), ids=CASES)
def test_guided_backpropagation_is_that_of_a_model_rewritten_by_hand(build, shape) -> None:
    """M16: on ReLU modules, in place or not, shared or not, the bits are those of the rewritten model."""
    torch.manual_seed(2)
    model = build().eval()
    if isinstance(model, VGG16):
        model.features.append(nn.Upsample(size=(7, 7)))
    x = torch.rand(shape)
    twin = rewritten(model)
    if isinstance(model, Witness):
        twin.relu6 = Rewritten()  # nothing here comes near 6
    with assert_hooks_restored(model):
        guided = guided_backprop(model, 0)(x)

    assert_same_bits(guided, gradient(twin, x, 0))
    assert guided.abs().max() > 0


def test_pitfall_functional_relus_are_cut() -> None:
    """M16: where the forward calls F.relu, a library that replaces modules gives the plain gradient without a word."""
    torch.manual_seed(2)
    model, x = Functional().eval(), torch.randn(4, 3, 8, 8)
    with mock.patch.object(F, "relu", ByHand.apply):
        expected = gradient(model, x, 3)
    plain = gradient(model, x, 3)

    assert_same_bits(guided_backprop(model, 3)(x), expected)
    assert not torch.equal(plain, expected)
    assert_same_bits(
        gradient(rewritten(model), x, 3), plain, "the pitfall: replacing modules changes nothing"
    )


def test_a_model_without_relus_is_an_error() -> None:
    """M16: nothing to cut is an error, not the plain gradient."""
    with pytest.raises(NothingCut, match="TanhBackward0"):
        guided_backprop(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), 0)(torch.randn(2, 3))


def test_one_hook_on_the_modules_does_the_same() -> None:
    """M16: where every ReLU is a module, the recipe is one hook: ``**{ReLU}:out.grad`` kept at 0 or above."""
    torch.manual_seed(2)
    model, x = resnet18().eval(), torch.randn(2, 3, 48, 48)
    with kedge.hook(model, "**{ReLU}:out.grad", kedge.clamp(min=0)):
        by_hook = gradient(model, x, 7)

    assert_same_bits(guided_backprop(model, 7)(x), by_hook)


def test_one_hook_on_the_operation_does_the_same() -> None:
    """M16: a ReLU that is a call of F.relu is a site as well: ``/relu:out.grad``."""
    torch.manual_seed(2)
    model, x = Functional().eval(), torch.randn(4, 3, 8, 8)
    with kedge.hook(model, "/relu:out.grad", kedge.clamp(min=0)):
        by_hook = gradient(model, x, 3)

    assert_same_bits(guided_backprop(model, 3)(x), by_hook)
