"""On real architectures: attributions are the gradients of the plain model, cut at every ReLU that it has."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("transformers")
from kedge.errors import NothingCut
from kedge.recipes import gradient, guided_backprop
from kedge.testing import assert_hooks_restored, assert_same_bits
from tests.architectures.training import seed
from tests.architectures.zoo import BY_NAME, Architecture, architectures
from tests.marks import sampled


def loss(output) -> Tensor:
    """What is explained."""
    return output["loss"]


def entrance(model: nn.Module, batch: dict[str, Tensor]) -> str:
    """The path of the first module that makes a floating-point tensor, and is called once."""
    found: dict[str, int] = {}
    modules = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, (nn.Embedding, nn.Conv1d, nn.Conv2d))
    }

    def note(name: str) -> Callable[..., None]:
        return lambda module, args, output: found.update({name: found.get(name, 0) + 1})

    handles = [module.register_forward_hook(note(name)) for name, module in modules.items()]
    model(**batch)
    for handle in handles:
        handle.remove()
    return next(name for name, calls in found.items() if calls == 1)


def plainly(model: nn.Module, path: str, batch: dict[str, Tensor]) -> Tensor:
    """The gradient at a module's output, by a hook of PyTorch's own."""
    seen = []
    module = model.get_submodule(path)
    handle = module.register_forward_hook(lambda m, args, out: seen.append(out.clone()) or seen[0])
    try:
        output = model(**batch)
    finally:
        handle.remove()
    return torch.autograd.grad(loss(output), seen[0])[0]


@architectures
def test_the_gradient_is_that_of_the_plain_model(architecture: Architecture) -> None:
    """In eval mode, at the first layer: the bits of a gradient that PyTorch's own hook takes."""
    model, batch = architecture.build().eval(), architecture.inputs()
    path = entrance(model, batch)
    seed(1)
    expected = plainly(model, path, batch)
    seed(1)
    with assert_hooks_restored(model):
        found = gradient(model, loss, wrt=path)(**batch)

    assert_same_bits(found, expected)


class ByHand(torch.autograd.Function):
    """A ReLU, with a ceiling or without, whose backward passes what is positive."""

    @staticmethod
    def forward(ctx, x, most):
        ctx.save_for_backward((x > 0) & (x < most))
        return x.clamp(0, most)

    @staticmethod
    def backward(ctx, grad):
        (passes,) = ctx.saved_tensors
        return torch.where(passes & (grad > 0), grad, torch.zeros_like(grad)), None


@pytest.mark.parametrize(
    "name",
    sampled(["resnet", "mobilenet_v2", "opt", "t5", "switch", "segformer"], ["resnet", "opt"]),
)
def test_guided_backpropagation_cuts_at_the_relus_of_the_architecture(name: str) -> None:
    """Where there are ReLUs, modules or functions, the bits are those of a model whose ReLUs were written by hand."""
    architecture = BY_NAME[name]
    model, batch = architecture.build().eval(), architecture.inputs()
    path = entrance(model, batch)

    def relu(x: Tensor, inplace: bool = False) -> Tensor:
        return ByHand.apply(x, float("inf"))

    def hardtanh(x: Tensor, low: float, high: float, inplace: bool = False) -> Tensor:
        assert low == 0
        return ByHand.apply(x, high)

    with mock.patch.object(F, "relu", relu), mock.patch.object(F, "hardtanh", hardtanh):
        expected = plainly(model, path, batch)
    plain = plainly(model, path, batch)

    assert_same_bits(guided_backprop(model, loss, wrt=path)(**batch), expected)
    assert not torch.equal(plain, expected)


def test_an_architecture_without_relus_is_an_error() -> None:
    """BERT's GELUs are no ReLUs."""
    model, batch = BY_NAME["bert"].build().eval(), BY_NAME["bert"].inputs()
    with pytest.raises(NothingCut, match="GeluBackward0"):
        guided_backprop(model, loss, wrt=entrance(model, batch))(**batch)
