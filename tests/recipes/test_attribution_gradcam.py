"""Grad-CAM and SmoothGrad against what one would write by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kedge.errors import AttributionError
from kedge.recipes.attribution.attribution import gradient, saliency
from kedge.recipes.attribution.gradcam import Tokens, grad_cam
from kedge.recipes.attribution.rectifiers import guided_backprop
from kedge.recipes.attribution.smoothing import smoothgrad
from kedge.testing import assert_same_bits, assert_unhooked
from tests.recipes.rewritten import images, made


def by_hand(model: nn.Module, layer: nn.Module, x: Tensor, target: int) -> Tensor:
    """Fifteen lines that many a notebook has."""
    kept = {}

    def keep(module, args, output):
        kept["value"] = output.detach().clone()
        output.register_hook(lambda grad: kept.update(grad=grad.clone()))

    handle = layer.register_forward_hook(keep)
    try:
        model(x)[:, target].sum().backward()
    finally:
        handle.remove()
    weights = kept["grad"].mean((2, 3), keepdim=True)
    cam = (weights * kept["value"]).sum(1, keepdim=True).relu()
    return F.interpolate(cam, x.shape[2:], mode="bilinear", align_corners=False).squeeze(1)


@pytest.mark.parametrize(
    "form", ["modules", "modules in place", "F.relu in place", "in a checkpoint"]
)
@pytest.mark.parametrize("site", ["conv1", "conv2"])
def test_the_map_has_the_bits_of_one_made_by_hand(form, site) -> None:
    """At any convolution, also one whose output the next operation overwrites."""
    model, x = made(form), images()
    twin = made(form)
    expected = by_hand(twin, twin.get_submodule(site), x, 2)

    assert_same_bits(grad_cam(model, site, 2)(x), expected)
    assert expected.abs().max() > 0
    assert_unhooked(model)


def test_maps_may_be_raw_of_any_size_signed_and_of_several_targets() -> None:
    """Without a size the map is that of the site; a list of targets gives one map each, as several calls do."""
    model, x = made("F.relu"), images()
    raw = grad_cam(model, "conv2", 2, size=None)(x)
    signed = grad_cam(model, "conv2", 2, size=None, positive=False)(x)

    assert raw.shape == (4, 6, 6)
    assert_same_bits(raw, signed.relu())
    assert signed.min() < 0
    assert grad_cam(model, "conv2", 2, size=(20, 10))(x).shape == (4, 20, 10)
    several = grad_cam(model, "conv2", [2, None, lambda out: out[:, 1] - out[:, 0]])(x)
    assert_same_bits(several[0], grad_cam(model, "conv2", 2)(x))
    assert_same_bits(several[1], grad_cam(model, "conv2")(x))
    assert several.shape == (3, 4, 8, 8)
    with pytest.raises(AttributionError, match=r"map \[6, 6\] cannot be resized to \[3\]"):
        grad_cam(model, "conv2", 2, size=(3,))(x)


class Patches(nn.Module):
    """A small vision transformer with a class token in front of 2 x 3 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), 1, 8), tokens], 1)
        return self.head(self.norm(self.block(x))[:, 0])


def test_tokens_lie_on_the_image_as_it_is_said() -> None:
    """The class token is dropped, the patches laid out row by row: the map is that of a convolution made by hand."""
    torch.manual_seed(0)
    model, x = Patches().eval(), torch.randn(2, 3, 8, 12)
    kept = {}
    handle = model.block.register_forward_pre_hook(lambda m, args: kept.update(value=args[0]))
    score = model(x)[:, 2].sum()
    handle.remove()
    grad = torch.autograd.grad(score, kept["value"])[0][:, 1:].transpose(1, 2).reshape(2, 8, 2, 3)
    value = kept["value"].detach()[:, 1:].transpose(1, 2).reshape(2, 8, 2, 3)
    expected = (grad.mean((2, 3), keepdim=True) * value).sum(1).relu()

    layout = Tokens(grid=(2, 3), skip=1)
    assert_same_bits(grad_cam(model, "block:in", 2, layout=layout, size=None)(x), expected)
    assert grad_cam(model, "block:in", 2, layout=layout)(x).shape == (2, 8, 12)
    assert_unhooked(model)


def test_tokens_without_a_layout_are_an_error_that_shows_one() -> None:
    """Neither tokens nor vectors are taken for channels on an image, and a grid must have the right number."""
    model, x = Patches().eval(), torch.randn(2, 3, 8, 12)
    with pytest.raises(
        AttributionError, match=r"needs \[samples, channels, rows, columns\].*layout=Tokens\("
    ):
        grad_cam(model, "block:in", 2)(x)
    with pytest.raises(AttributionError, match=r"needs \[samples, channels, rows, columns\]"):
        grad_cam(model, "head", 2)(x)
    with pytest.raises(
        AttributionError, match=r"stands for 0 \+ 6 tokens, but the site gave float32\[2, 7, 8\]"
    ):
        grad_cam(model, "block:in", 2, layout=Tokens((2, 3)))(x)


def test_channels_that_stand_last_are_laid_out_by_a_function() -> None:
    """Any function may say how a value lies on the image."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 6)
            self.fc = nn.Linear(6, 2)

        def forward(self, x):
            return self.fc(self.inner(x.permute(0, 2, 3, 1)).mean((1, 2)))

    assert grad_cam(Last(), "inner", 1, layout=lambda v: v.movedim(-1, 1))(
        torch.randn(2, 3, 4, 5)
    ).shape == (2, 4, 5)


def test_signals_and_volumes_have_maps_too() -> None:
    """One or three dimensions are interpolated as two are."""
    for conv, shape in ((nn.Conv1d(2, 4, 3), (2, 2, 9)), (nn.Conv3d(2, 4, 3), (2, 2, 6, 6, 6))):
        model = nn.Sequential(conv, nn.Flatten(), nn.LazyLinear(3))
        model(torch.zeros(shape))
        assert grad_cam(model, "0", 1)(torch.randn(shape)).shape == (2, *shape[2:])


def test_smoothgrad_is_the_mean_over_noisy_copies() -> None:
    """The noise is a share of each sample's range, from a generator of its own; the class is that of the plain input."""
    model, x = made("all kinds"), images()
    best, generator = model(x).argmax(1), torch.Generator().manual_seed(5)
    span = x.amax((1, 2, 3), keepdim=True) - x.amin((1, 2, 3), keepdim=True)
    total = torch.zeros_like(x)
    for _ in range(6):
        y = (x + torch.randn(x.shape, generator=generator) * span * 0.3).requires_grad_()
        total = total + torch.autograd.grad(model(y)[range(4), best].sum(), y)[0].abs()
    before = torch.get_rng_state()
    smooth = smoothgrad(saliency(model), samples=6, noise=0.3, seed=5)(x)

    assert_same_bits(smooth, total / 6)
    assert torch.equal(torch.get_rng_state(), before)


def test_copies_at_once_give_the_same_with_less_time() -> None:
    """Noise and classes are those of one copy at a time; the batch has at most as many copies as are asked for."""
    model, x, sizes = made("F.relu"), images(), []
    labels = torch.tensor([0, 1, 2, 3])
    one = smoothgrad(gradient(model, labels), samples=7, seed=2)(x)
    handle = model.register_forward_pre_hook(lambda m, args: sizes.append(len(args[0])))
    many = smoothgrad(gradient(model, labels), samples=7, seed=2, at_once=3)(x)
    handle.remove()

    torch.testing.assert_close(many, one)
    assert sizes == [4, 12, 12, 4]  # once without noise


def test_smoothgrad_smooths_whatever_gives_a_map() -> None:
    """Guided backpropagation, Grad-CAM (with noise on the image), several targets, several inputs."""
    model, x = made("modules"), images()

    def check(recipe) -> None:
        alone = smoothgrad(recipe, samples=1, noise=0)(x)
        assert_same_bits(alone, recipe(x))
        assert not torch.equal(smoothgrad(recipe, samples=2)(x), alone)

    check(guided_backprop(model, 2))
    check(grad_cam(model, "conv2", 2))
    check(gradient(model, [1, 2]))

    class Two(nn.Module):
        def forward(self, a, b):
            return a * b

    a, b = torch.randn(2, 3), torch.randn(2, 3)
    both = smoothgrad(
        gradient(Two(), 1, wrt=[":in[a]", ":in[b]"]), samples=400, noise=0.1, at_once=50
    )(a, b=b)
    torch.testing.assert_close(both[":in[a]"][:, 1], b[:, 1], atol=0.1, rtol=0)
    torch.testing.assert_close(both[":in[b]"][:, 1], a[:, 1], atol=0.1, rtol=0)


def test_nonsense_is_refused() -> None:
    """No copy, none at once or negative noise."""
    recipe = saliency(made("modules"))
    for wrong in ({"samples": 0}, {"at_once": 0}, {"noise": -1.0}):
        with pytest.raises(AttributionError, match="at least one copy"):
            smoothgrad(recipe, **wrong)
