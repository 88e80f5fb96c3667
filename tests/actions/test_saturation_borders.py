"""Where activations are flat: the borders between which their slope is more than a thousandth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from kedge.actions.measure.saturation import FLAT, saturation


@pytest.mark.parametrize(
    ("how", "activation", "numbers"),
    [
        ("tanh", nn.Tanh(), ()),
        ("sigmoid", nn.Sigmoid(), ()),
        ("softsign", nn.Softsign(), ()),
        ("softmax", None, (1,)),
    ],
)
def test_the_borders_are_where_the_slope_is_a_thousandth(
    how: str, activation: nn.Module, numbers: tuple[int]
) -> None:
    """As autograd has it: outputs beyond them have less, those between more."""
    known, apply = saturation(how, numbers), activation or _first_of_two
    x = torch.linspace(-40, 40, 20_001, dtype=torch.float64, requires_grad=True)
    y = apply(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    outside = (y <= known.low) | (y >= known.high)
    clear = (slope - FLAT).abs() > 1e-9
    assert ((slope < FLAT) == outside)[clear].all()
    assert known.count(y.detach().numpy()) == int(outside.sum())
    assert 0 < outside.sum() < len(x)


def _first_of_two(x: torch.Tensor) -> torch.Tensor:
    """The first output of a softmax of two."""
    return torch.stack([x, torch.zeros_like(x)]).softmax(0)[0]


@pytest.mark.parametrize(
    ("make", "borders"), [(nn.Hardtanh, (-1.0, 1.0)), (nn.ReLU6, (-np.inf, 6.0))]
)
def test_what_is_cut_off_is_flat_from_there_on(
    make: Callable[[], nn.Module], borders: tuple[float, float]
) -> None:
    """At the border itself too; NaN is nowhere."""
    known = saturation("between", borders)
    y = make()(torch.tensor([-9.0, -1.0, 0.5, 1.0, 6.0, 9.0, torch.nan])).numpy()
    flat = {nn.Hardtanh: 5, nn.ReLU6: 2}[make]
    assert known.count(y) == flat
