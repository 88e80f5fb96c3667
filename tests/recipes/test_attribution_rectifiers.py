"""Guided backpropagation and the deconvolutional network: the gradient is cut at every ReLU, or it is said why not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kedge
from kedge.errors import AttributionError, NothingCut
from kedge.recipes.attribution.attribution import gradient
from kedge.recipes.attribution.rectifiers import deconvnet, guided_backprop
from kedge.testing import assert_same_bits, assert_unhooked
from tests.recipes.rewritten import (
    FORMS,
    Checkpointed,
    DeconvolutionByHand,
    GuidedByHand,
    Rectified,
    by_hand,
    images,
    made,
    plainly,
)

METHODS = {"guided": (guided_backprop, GuidedByHand), "deconvnet": (deconvnet, DeconvolutionByHand)}
methods = pytest.mark.parametrize(("recipe", "by_paper"), METHODS.values(), ids=METHODS)


@pytest.mark.parametrize("form", FORMS)
@methods
def test_every_relu_is_cut_as_in_a_model_rewritten_by_hand(recipe, by_paper, form) -> None:
    """However a ReLU is written, the result has the bits of a model whose ReLUs have the paper's backward."""
    model, x = made(form), images()
    expected = plainly(by_hand(by_paper), x, 2)

    assert_same_bits(recipe(model, 2)(x), expected)
    assert not torch.equal(plainly(model, x, 2), expected)
    assert_unhooked(model)


@methods
def test_a_relu_with_a_ceiling_is_cut_too(recipe, by_paper) -> None:
    """ReLU6, as a module and as a function, is a ReLU; a Hardtanh from -1 is none."""
    torch.manual_seed(3)
    model, x = Rectified(nn.ReLU6(), F.relu6, nn.ReLU6(inplace=True)), images()

    assert_same_bits(
        recipe(model, 2)(x), plainly(by_hand(by_paper), x, 2)
    )  # nothing reaches 6 here

    model.first, model.second, model.third = nn.Hardtanh(), None, nn.Hardtanh()
    model.second = nn.Hardtanh()
    with pytest.raises(NothingCut, match="3 HardtanhBackward0"):
        recipe(model, 2)(x)


@methods
def test_no_relu_is_an_error_that_says_what_was_looked_for(recipe, by_paper) -> None:
    """A model without ReLUs would give the plain gradient; that is an error which names what is there instead."""
    model = Rectified(F.gelu, nn.GELU(), torch.tanh)
    with pytest.raises(
        NothingCut, match=r"cut nothing.*nn\.ReLU, F\.relu.*2 GeluBackward0"
    ) as raised:
        recipe(model, 2)(images())

    assert "saliency" in str(raised.value)
    assert_unhooked(model)


@methods
def test_a_relu_that_is_not_on_the_way_does_not_count(recipe, by_paper) -> None:
    """ReLUs of a branch that the score does not come from, or that lies behind the site, cut nothing."""

    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return {"aside": self.fc(x).relu(), "logits": self.fc(x)}

    with pytest.raises(NothingCut):
        recipe(Aside(), lambda out: out["logits"][:, 0])(torch.randn(2, 3))
    with pytest.raises(NothingCut):
        recipe(made("F.relu"), 2, wrt="fc2:in")(images())


@methods
def test_a_gradient_that_passes_no_relu_is_an_error(recipe, by_paper) -> None:
    """A ReLU that is in the graph, but behind something that sends no gradient back, has cut nothing."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    class Stopped(nn.Module):
        def forward(self, x):
            return x + Stop.apply(x.relu())

    with pytest.raises(NothingCut, match="passes through none of the 1 ReLUs"):
        recipe(Stopped(), 0)(torch.randn(2, 3))


def test_a_reentrant_checkpoint_is_an_error() -> None:
    """Its graph is made in the backward, out of reach, and PyTorch differentiates it with respect to no input."""
    with pytest.raises(NothingCut, match="reentrant checkpoint.*use_reentrant=False"):
        guided_backprop(Checkpointed(reentrant=True), 2)(images())


class Slices(nn.Module):
    """Works in place on a part of a tensor, by an operation that may be a ReLU, after one that is."""

    def __init__(self, change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x):
        x = x.relu() * 1
        self.change(x[:, :2])
        return x.flatten(1)


@pytest.mark.parametrize(
    ("change", "site"),
    [
        (torch.Tensor.relu_, "/relu_"),
        (lambda x: F.relu(x, inplace=True), "/relu"),
        (nn.ReLU(inplace=True), "change/relu"),
        (nn.ReLU6(inplace=True), "change/hardtanh"),
        (lambda x: F.relu6(x, inplace=True), "/relu6"),
    ],
)
@methods
def test_a_relu_on_a_part_of_a_tensor_is_an_error_that_names_it(
    recipe, by_paper, change, site
) -> None:
    """Autograd joins it with what made the tensor, so that it cannot be cut; the error names its site."""
    model = Slices(change)
    with pytest.raises(NothingCut, match=f"cannot cut at {site}: .*inplace=False"):
        recipe(model, 2)(images())

    assert_unhooked(model)


class Views(nn.Module):
    """Works in place on views of whole tensors: of what a linear layer makes of tokens, flattened, transposed."""

    def __init__(self, relu) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = (
            nn.Linear(*shape) for shape in ((3, 16), (16, 16), (16, 16), (16, 2))
        )
        self.relu = relu

    def forward(self, x):
        x = self.relu(self.fc1(x))
        x = self.relu((x * self.fc2(x)).flatten(0, 1))
        x = self.relu((self.fc3(x) * 2).t())
        return self.fc4(x.t()).unflatten(0, (2, 5)).sum(1)


@pytest.mark.parametrize("relu", [nn.ReLU(inplace=True), nn.ReLU6(inplace=True), torch.relu_])
@methods
def test_a_relu_on_a_view_of_a_whole_tensor_is_cut(recipe, by_paper, relu) -> None:
    """What a linear layer makes of tokens is a view, and a ReLU may work on it in place."""
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = Views(relu if isinstance(relu, nn.Module) else lambda x: relu(x))
    torch.manual_seed(0)
    expected = plainly(Views(by_paper.apply), x, 1)

    assert_same_bits(recipe(model, 1)(x), expected)
    assert_same_bits(recipe(model, [0, 1])(x)[1], expected)
    assert not torch.equal(plainly(model, x, 1), expected)
    assert_unhooked(model)


@methods
def test_other_changes_to_a_part_of_a_tensor_are_no_hindrance(recipe, by_paper) -> None:
    """A slice that is scaled or set in place hides no ReLU, and the others are cut."""

    def reference(x):
        x = by_paper.apply(x) * 1
        return torch.cat([F.leaky_relu(x[:, :2] * -3), x[:, 2:]], 1).flatten(1)

    model, x = Slices(lambda part: F.leaky_relu(part.mul_(-3), inplace=True)), images()
    y = x.clone().requires_grad_()
    expected = torch.autograd.grad(reference(y)[:, 2].sum(), y)[0]

    assert torch.equal(
        recipe(model, 2)(x), expected
    )  # zeros may have another sign: the two add up differently
    assert_unhooked(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_part_is_an_error() -> None:
    """TorchScript's executor gives the whole part one node."""
    torch.manual_seed(0)
    model = nn.Sequential(
        torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.ReLU())), nn.Linear(4, 2)
    )
    x = torch.randn(2, 3)
    for _ in range(2):  # the executor learns what it runs, and fuses it then
        model(x.clone().requires_grad_()).sum().backward()

    with pytest.raises(NothingCut, match="scripted part"):
        guided_backprop(model, 0)(x)


@pytest.mark.filterwarnings("ignore::kedge.errors.Recompiled")
@methods
def test_a_compiled_model_is_run_as_it_was_written(recipe, by_paper, compiled) -> None:
    """Compiled code has no ReLUs to cut, so the model runs eagerly meanwhile, and compiled again afterwards."""
    model, x = made("all kinds"), images()
    fast = compiled(model, backend="aot_eager")
    before = fast(x)

    assert_same_bits(recipe(fast, 2)(x), plainly(by_hand(by_paper), x, 2))
    assert_same_bits(fast(x), before)


@methods
def test_several_targets_are_each_cut(recipe, by_paper) -> None:
    """One forward and several backwards give what several calls give."""
    model, x = made("F.relu"), images()
    both = recipe(model, [2, 4])(x)

    assert_same_bits(
        both, torch.stack([plainly(by_hand(by_paper), x, target) for target in (2, 4)])
    )


@methods
def test_asking_twice_and_in_turn_gives_the_same(recipe, by_paper) -> None:
    """Nothing of one question is left for the next: neither hooks nor counts."""
    model, x = made("one shared module in place"), images()
    asked = recipe(model, 2)
    first, plain = asked(x), gradient(model, 2)(x)

    assert_same_bits(asked(x), first)
    assert_same_bits(plain, plainly(model, x, 2))
    with pytest.raises(AttributionError, match="5 classes"):
        recipe(model, 7)(x)
    assert_same_bits(asked(x), first)
    assert_unhooked(model)


FLOORS = {
    "clamp(min=0)": lambda x: x.clamp(min=0),
    "clip(0)": lambda x: x.clip(0),
    "clamp_min(0)": lambda x: x.clamp_min(0),
    "clamp(0, 6)": lambda x: x.clamp(0, 6),
    "clamp_": lambda x: (x * 1).clamp_(min=0),
    "threshold": lambda x: F.threshold(x, 0, 0),
}


@pytest.mark.parametrize("floor", FLOORS.values(), ids=FLOORS)
@methods
def test_a_relu_by_another_name_is_cut_beside_others(recipe, by_paper, floor) -> None:
    """What is nothing below 0 is a ReLU, whether it is written as one or as a clamp."""
    torch.manual_seed(3)
    model = Rectified(nn.ReLU(), floor, F.relu).eval()

    assert_same_bits(recipe(model, 2)(images()), plainly(by_hand(by_paper), images(), 2))


def test_clamps_from_elsewhere_are_not_cut() -> None:
    """A clamp that begins at another number, or has an upper end only, lets the gradient by."""
    torch.manual_seed(3)
    plain = Rectified(nn.ReLU(), lambda x: x.clamp(min=-1).clamp(max=2), F.relu).eval()
    hooked = images().requires_grad_()
    with kedge.hook(plain, "**/relu:out.grad", kedge.clamp(min=0)):
        plain(hooked)[:, 2].sum().backward()

    assert_same_bits(guided_backprop(plain, 2)(images()), hooked.grad)


class Partly(nn.Module):
    """Works on a part of a tensor in place, between ReLUs."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        x = x.relu() - 1
        self.change(x[:, :2])
        return x.flatten(1)


def test_a_clamp_on_a_part_of_a_tensor_is_an_error_only_where_it_may_be_a_relu() -> None:
    """Autograd does not tell from where it clamps there; if nothing negative is left, it may be from 0."""
    with pytest.raises(NothingCut, match="cannot cut at /clamp_"):
        guided_backprop(Partly(lambda x: x.clamp_(min=0)), 2)(images())
    for change in (lambda x: x.clamp_(max=0.5), nn.Hardtanh(inplace=True)):
        assert guided_backprop(Partly(change), 2)(images()).shape == images().shape
