"""Integrated gradients: exact where the integral is known, complete elsewhere, and the same however it is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import AttributionError
from kedge.recipes.attribution.integrated import integrated_gradients
from kedge.testing import assert_same_bits, assert_unhooked
from tests.recipes.rewritten import images, made


class Cubic(nn.Module):
    """A score whose gradient is a polynomial: the sum of a times x cubed, and x times b."""

    def forward(self, x: Tensor, b: Tensor) -> Tensor:
        """Map [n, 3] and [n, 3] to [n, 1]."""
        return (2 * x**3 + x * b).sum(1, keepdim=True)


def test_the_integral_of_a_polynomial_is_exact() -> None:
    """Two steps of the rule are exact for a gradient of degree two, from any baseline."""
    x, b = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    base = torch.randn(3, dtype=torch.float64)
    found = integrated_gradients(Cubic(), 0, wrt=":in[x]", baseline=base, steps=2)(x, b)

    torch.testing.assert_close(found, 2 * (x**3 - base**3) + (x - base) * b)


def test_several_inputs_go_their_way_together() -> None:
    """What they share is divided between them."""
    x, b = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    found = integrated_gradients(Cubic(), 0, wrt=[":in[x]", ":in[b]"], steps=3)(x, b=b)

    torch.testing.assert_close(found[":in[b]"], x * b / 2)
    torch.testing.assert_close(found[":in[x]"], 2 * x**3 + x * b / 2)


@pytest.mark.parametrize(
    "form", ["modules", "modules in place", "F.relu in place", "in a checkpoint"]
)
def test_attributions_add_up_to_the_rise_of_the_score(form: str) -> None:
    """Completeness, of the class that the input itself has; hooks, statistics and the input stay."""
    model, x = made(form), images()
    before = x.clone()
    best = model(x).argmax(1)
    found = integrated_gradients(model, baseline=0.1, steps=200, at_once=50)(x)
    with torch.no_grad():
        rise = model(x) - model(torch.full_like(x, 0.1))

    rows = torch.arange(len(x))
    torch.testing.assert_close(found.flatten(1).sum(1), rise[rows, best], atol=2e-3, rtol=0)
    assert_same_bits(x, before)
    assert_unhooked(model)


def test_places_at_once_give_the_same() -> None:
    """Also for several targets, with one baseline for each sample."""
    model, x = made("modules"), images()
    ask = {"baseline": torch.randn_like(x), "steps": 7}
    one = integrated_gradients(model, [1, 2], **ask)(x)
    many = integrated_gradients(model, [1, 2], at_once=3, **ask)(x)

    assert one.shape == (2, *x.shape)
    torch.testing.assert_close(many, one)


def test_the_way_of_a_layer_begins_at_its_own_baseline() -> None:
    """At a layer, the baseline is a value of that layer."""
    model, x = made("modules").double(), images().double()
    with kedge.hook(model, "conv2", kedge.record()) as kept:
        model(x)
    value = kept["conv2"].detach()
    found = integrated_gradients(model, 2, wrt="conv2", steps=20)(x)

    assert found.shape == value.shape
    expected = sum(
        weight * _slope(model, x, place) for place, weight in zip(*_rule(20), strict=True)
    )
    torch.testing.assert_close(found, value * expected)


def _rule(steps: int) -> tuple[list[float], list[float]]:
    import numpy as np

    places, weights = np.polynomial.legendre.leggauss(steps)
    return [(place + 1) / 2 for place in places], [weight / 2 for weight in weights]


def _slope(model: nn.Module, x: Tensor, place: float) -> Tensor:
    """The gradient of class 2 with the layer's output scaled, by a hook of PyTorch's."""
    kept: list[Tensor] = []

    def scaled(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        kept.append((output.detach() * place).requires_grad_())
        return kept[0]

    handle = model.get_submodule("conv2").register_forward_hook(scaled)
    try:
        return torch.autograd.grad(model(x)[:, 2].sum(), kept[0])[0]
    finally:
        handle.remove()


def test_what_does_not_fit_is_refused() -> None:
    """Numbers of steps, and baselines of another shape."""
    model, x = made("modules"), images()
    for wrong in ({"steps": 0}, {"steps": 2.5}, {"at_once": 0}, {"baseline": "black"}):
        with pytest.raises(AttributionError, match="whole numbers from 1 on"):
            integrated_gradients(model, 1, **wrong)
    with pytest.raises(AttributionError, match=r"baseline has the shape \[5\]"):
        integrated_gradients(model, 1, baseline=torch.zeros(5))(x)
    with pytest.raises(AttributionError, match="nothing to integrate along"):
        integrated_gradients(nn.Embedding(3, 2), 1)(torch.tensor([0, 1]))


class Masked(nn.Module):
    """A model with an input that has no gradient beside the one that has."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Keep the features at the given places."""
        return batch["x"] * batch["keep"]


def test_inputs_of_whole_numbers_stay_as_they_are() -> None:
    """The way is that of the other one, and a baseline with a gradient is only a place."""
    batch = {"x": torch.ones(2, 3), "keep": torch.tensor([[0, 1, 1], [1, 0, 0]])}
    baseline = torch.zeros(3, requires_grad=True)
    found = integrated_gradients(Masked(), target=1, baseline=baseline, at_once=3)(batch)
    assert_same_bits(found.round(decimals=4), torch.tensor([[0.0, 1, 0], [0, 0, 0]]))
    assert not found.requires_grad
