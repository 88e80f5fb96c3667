"""Saliency: what is explained and where, on models of every kind, which are left as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kedge.errors import AttributionError, InTrainingMode
from kedge.recipes.attribution.attribution import gradient, saliency
from kedge.recipes.attribution.gradcam import grad_cam
from kedge.recipes.attribution.rectifiers import deconvnet, guided_backprop
from kedge.recipes.attribution.smoothing import smoothgrad
from kedge.testing import assert_hooks_restored, assert_same_bits
from tests.recipes.rewritten import Checkpointed, images, made, plainly

RECIPES: dict[str, Callable[[nn.Module], Callable]] = {
    "gradient": gradient,
    "saliency": saliency,
    "guided": guided_backprop,
    "deconvnet": deconvnet,
    "grad_cam": lambda model: grad_cam(model, "conv2"),
    "smoothgrad": lambda model: smoothgrad(saliency(model), samples=3),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def test_saliency_is_the_size_of_the_gradient() -> None:
    """Of a class, of one class a sample and of the class with the highest score: the bits of a gradient taken by hand."""
    model, x = made("modules"), images()
    best = model(x).argmax(1)
    one_each = torch.tensor([0, 3, 3, 1])

    def expected(classes: Tensor) -> Tensor:
        y = x.clone().requires_grad_()
        return torch.autograd.grad(model(y)[range(4), classes].sum(), y)[0]

    assert_same_bits(gradient(model, 1)(x), plainly(model, x, 1))
    assert_same_bits(saliency(model, 1)(x), plainly(model, x, 1).abs())
    assert_same_bits(gradient(model, -1)(x), plainly(model, x, 4))
    assert_same_bits(gradient(model, one_each)(x), expected(one_each))
    assert_same_bits(gradient(model)(x), expected(best))
    assert_same_bits(gradient(model, lambda out: out[:, 1])(x), plainly(model, x, 1))
    several = gradient(model, [1, one_each, None, lambda out: out[:, 2]])(x)
    assert_same_bits(
        several,
        torch.stack(
            [plainly(model, x, 1), expected(one_each), expected(best), plainly(model, x, 2)]
        ),
    )


@recipes
def test_the_model_is_left_as_it_was(recipe) -> None:
    """Flags, gradients, requires_grad, hooks, weights, buffers, random numbers and the input's .grad are not touched."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.conv1, model.norm, model.drop = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout()
    model.conv2, model.relu, model.flat, model.fc = (
        nn.Conv2d(8, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 5),
    )
    model.train()
    model.conv2.eval()
    model.fc.requires_grad_(False)
    x = images().requires_grad_()
    model(x).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    bits = copy.deepcopy({name: g for name, g in grads.items() if g is not None})
    own, kept = x.grad, x.grad.clone()
    state, flags = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    needs, rng, before = (
        [p.requires_grad for p in model.parameters()],
        torch.get_rng_state(),
        x.detach().clone(),
    )

    with (
        assert_hooks_restored(model),
        pytest.warns(InTrainingMode, match=r"\(BatchNorm2d norm, Dropout drop\)"),
    ):
        recipe(model)(x)

    assert all(p.grad is grads[name] for name, p in model.named_parameters())
    assert_same_bits({name: grads[name] for name in bits}, bits)
    assert x.grad is own
    assert_same_bits((x.grad, x, model.state_dict()), (kept, before, state))
    assert [m.training for m in model.modules()] == flags
    assert [p.requires_grad for p in model.parameters()] == needs
    assert torch.equal(torch.get_rng_state(), rng)


@recipes
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_outside_and_frozen_models_make_no_difference(recipe, mode) -> None:
    """Under no_grad or in inference mode, with all weights frozen, the answer is the same, and the mode stays on."""
    model, x = made("all kinds"), images()
    expected = recipe(model)(x)
    model.requires_grad_(False)
    with mode():
        answer = recipe(model)(x.clone())  # in inference mode a tensor that autograd refuses
        assert not torch.is_grad_enabled()

    assert_same_bits(answer, expected)
    assert not answer.requires_grad


@recipes
def test_an_error_in_the_model_leaves_it_as_it_was(recipe) -> None:
    """However the forward ends, hooks, modes and random numbers are what they were."""
    model, x = made("modules"), images()
    rng = torch.get_rng_state()
    with assert_hooks_restored(model), pytest.raises(RuntimeError):
        recipe(model)(x[:, :2])

    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled()


class Out(NamedTuple):
    """What some models return."""

    logits: Tensor
    hidden: Tensor


class TwoInputs(nn.Module):
    """An image, a scale by keyword, and an index that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, image: Tensor, shift: int, *, scale: Tensor, rows: Tensor) -> Out:
        hidden = (image.flatten(1) * scale)[rows] + shift
        return Out(self.fc(hidden), hidden)


def test_several_inputs_are_listed_by_name() -> None:
    """With two floating-point inputs the message lists both; each can be explained, or both in one pass."""
    torch.manual_seed(0)
    model, image, scale, rows = (
        TwoInputs(),
        torch.randn(2, 2, 3),
        torch.randn(2, 6),
        torch.tensor([1, 0]),
    )
    with pytest.raises(AttributionError, match=r'matches 2 values.*":in\[image\]", ":in\[scale\]"'):
        saliency(model)(image, 1, scale=scale, rows=rows)
    with pytest.raises(AttributionError, match=r"Out with \[logits\], \[hidden\].*Which part"):
        saliency(model, 1, wrt=":in[scale]")(image, 1, scale=scale, rows=rows)

    def target(out: Out) -> Tensor:
        return out.logits[:, 1]

    y, z = image.clone().requires_grad_(), scale.clone().requires_grad_()
    grads = torch.autograd.grad(target(model(y, 1, scale=z, rows=rows)).sum(), [y, z])
    both = gradient(model, target, wrt=[":in[image]", ":in[scale]"])(
        image, 1, scale=scale, rows=rows
    )
    assert_same_bits(both, {":in[image]": grads[0], ":in[scale]": grads[1]})
    assert_same_bits(
        gradient(model, target, wrt=":in[scale]")(image, 1, scale=scale, rows=rows), grads[1]
    )
    with pytest.raises(AttributionError, match="there is nothing to add noise to"):
        smoothgrad(saliency(model, target, wrt=":in[rows]"))(image, 1, scale=scale, rows=rows)


def test_text_is_explained_at_its_embedding() -> None:
    """Token ids have no gradient, and the message says so; the output of their embedding has one, frozen or not."""
    torch.manual_seed(0)
    model, ids = (
        nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2)).eval(),
        torch.tensor([[1, 2, 3]]),
    )
    with pytest.raises(AttributionError, match=r":in\[input\] is int64\[1, 3\].*embedding"):
        saliency(model)(ids)

    expected = model[2].weight[1].reshape(1, 3, 4).abs().detach()
    assert_same_bits(saliency(model, 1, wrt="0")(ids), expected)
    model.requires_grad_(False)
    assert_same_bits(saliency(model, 1, wrt="0")(ids), expected)
    with torch.inference_mode():
        assert_same_bits(saliency(model, 1, wrt="0")(ids.clone()), expected)


def test_a_site_within_the_model_can_be_explained() -> None:
    """The gradient at a module's output is that of a hook on it, also in a checkpoint and where the next works in place."""
    model, x = made("modules in place"), images()
    seen = []
    handle = model.conv1.register_forward_hook(
        lambda m, i, out: out.register_hook(lambda g: seen.append(g.clone())) and None
    )
    model(x)[:, 1].sum().backward()
    handle.remove()
    assert_same_bits(gradient(model, 1, wrt="conv1")(x), seen[0])

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    assert_same_bits(gradient(Again(), 1, wrt="inner.conv1")(x), seen[0])
    with pytest.raises(
        AttributionError, match=r'"conv\?" matches 2 values; name one of "conv1:out", "conv2:out"'
    ):
        gradient(model, 1, wrt="conv?")(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_sites_behind_one_another_each_have_their_whole_gradient(frozen) -> None:
    """The gradient at an early site goes through the later ones too, in a model that is frozen or not."""
    model, x, sites = made("one shared module in place"), images(), ["conv2", ":in", "fc1", "conv1"]
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable:
        return lambda module, args, out: (
            out.register_hook(lambda g: seen.update({name: g.clone()})) and None
        )

    y = x.clone().requires_grad_()
    handles = [model.get_submodule(n).register_forward_hook(keep(n)) for n in sites if n != ":in"]
    seen[":in"] = torch.autograd.grad(model(y)[:, 1].sum(), y)[0]
    for handle in handles:
        handle.remove()
    model.requires_grad_(not frozen)

    assert_same_bits(gradient(model, 1, wrt=sites)(x), {name: seen[name] for name in sites})
    assert_same_bits(
        guided_backprop(model, 1, wrt=["conv1", ":in"])(x)[":in"], guided_backprop(model, 1)(x)
    )


def test_one_call_of_many_can_be_explained() -> None:
    """A module that is called twice is two values, and the message has their names; a list of no site is an error."""
    torch.manual_seed(0)
    fc = nn.Linear(3, 3)
    model, x = nn.Sequential(fc, nn.Tanh(), fc), torch.randn(2, 3)
    with pytest.raises(AttributionError, match='one of "0#0:out", "0#1:out"'):
        gradient(model, 1, wrt="0")(x)

    assert_same_bits(gradient(model, 1, wrt="0#1")(x), torch.tensor([[0.0, 1, 0]] * 2))
    with pytest.raises(AttributionError, match="names no site"):
        gradient(model, 1, wrt=[])


def test_a_model_may_work_on_its_input_in_place() -> None:
    """The model gets a copy, so that neither autograd nor the caller minds."""

    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2).relu_()

    x = torch.tensor([[1.0, -1.0]])
    assert_same_bits(gradient(InPlace(), 0)(x), torch.tensor([[2.0, 0.0]]))
    assert x.tolist() == [[1, -1]]


@pytest.mark.parametrize(
    ("forward", "target", "message"),
    [
        (lambda x: x[:, 0], None, "are these classes, or samples"),
        (lambda x: x[:, 0], 3, "the model has 2 classes"),
        (lambda x: x, torch.tensor([0, 1, 0]), "an integer for each of the 2 samples"),
        (lambda x: x, torch.tensor([0.5, 1]), r"target=float32\[2\] is no class"),
        (lambda x: x.reshape(2, 3, 1), 0, "no classes in its second"),
        (lambda x: x.long(), 0, "Which part"),
        (lambda x: x.detach(), 0, "has no gradient"),
        (
            lambda x: x,
            lambda out: 3,
            "the target returned 3; it must return a floating-point tensor",
        ),
        (lambda x: x, [], "the list of targets is empty"),
        (lambda x: x, "3", "a class is a number"),
        (lambda x: torch.ones(2, 2, requires_grad=True), 0, 'the score does not depend on ":in"'),
    ],
)
def test_a_target_that_does_not_fit_is_an_error_that_says_what_there_is(
    forward, target, message
) -> None:
    """Nothing is guessed: the message says what the model gave and how to name what is meant."""

    class Model(nn.Module):
        def forward(self, x):
            return forward(x)

    with pytest.raises(AttributionError, match=message):
        gradient(Model(), target)(torch.randn(2, 3))


def test_a_site_that_is_not_reached_is_an_error_with_its_cause() -> None:
    """A module that the forward leaves out has nothing to explain, and the message says why."""

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.used(x)

    with pytest.raises(AttributionError, match="unused.*never called"):
        gradient(Unused(), 0, wrt="unused")(torch.randn(2, 3))


def test_a_reentrant_checkpoint_is_an_error_that_says_what_to_do() -> None:
    """PyTorch differentiates it with respect to no input; another error of the backward stays what it is."""
    model = Checkpointed(reentrant=True)
    with pytest.raises(AttributionError, match="use_reentrant=False"):
        gradient(model, 2)(images())

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("broken")

    class Model(nn.Module):
        def forward(self, x):
            return Broken.apply(x)

    with pytest.raises(RuntimeError, match="broken"):
        gradient(Model(), 2)(torch.randn(2, 3))


def test_scalar_and_one_dimensional_outputs_have_their_meaning() -> None:
    """A number explains itself; a vector's class is one of its entries."""

    class Model(nn.Module):
        def __init__(self, forward):
            super().__init__()
            self.function = forward

        def forward(self, x):
            return self.function(x)

    x = torch.randn(3)
    assert gradient(Model(lambda x: (2 * x).sum()))(x).tolist() == [2, 2, 2]
    assert gradient(Model(lambda x: 2 * x), 1)(x).tolist() == [0, 2, 0]
    assert gradient(Model(lambda x: F.softmax(x, 0)), lambda out: out)(x).abs().max() < 1e-6


def test_smoothgrad_keeps_the_digits_of_half_precision() -> None:
    """The mean of many copies is summed up in float32, so it is no further off than one gradient is."""
    model = nn.Linear(4, 3)
    many = smoothgrad(gradient(model.bfloat16(), 1), samples=999)(torch.ones(2, 4).bfloat16())

    assert_same_bits(many, model.weight[1].detach().expand(2, 4).contiguous())


def test_a_function_of_the_output_is_asked_about_each_copy() -> None:
    """How many copies go through the model at once makes no difference to a target that picks samples by their place."""
    model, x = made("modules"), images()
    one_by_one, together = (
        smoothgrad(
            saliency(model, lambda out: out[[0, 1, 2, 3], [4, 3, 2, 1]]), samples=5, at_once=k
        )(x)
        for k in (1, 3)
    )

    torch.testing.assert_close(together, one_by_one)


def test_arguments_in_another_order_are_an_error_that_says_so() -> None:
    """The images in place of the model, and the target in place of the layer."""
    with pytest.raises(
        AttributionError,
        match=r"takes a model first, not a Tensor; .* saliency\(model, target=3\)\(images\)",
    ):
        saliency(torch.zeros(1, 2))
    with pytest.raises(
        AttributionError, match="a Tensor is not the name of a place in the model: give a selector"
    ):
        grad_cam(nn.Linear(2, 2), torch.zeros(1, 2))
