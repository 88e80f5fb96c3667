"""Activations that saturate: which of their outputs lie where hardly any gradient passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FLAT = 1e-3
"""The slope below which an output counts as saturated: a thousandth of what the identity passes back."""

_ROUNDING = frozenset({torch.float16, torch.bfloat16, torch.float32})


@dataclass(frozen=True)
class Saturation:
    """Where an activation is flat: its outputs that are not above one number, and those not below another. NaN is neither.

    Attributes:
        low: The lower of the two.
        high: The higher.
        dim: The dimension whose largest output decides, where outputs compete as those of a softmax do.
    """

    low: float
    high: float
    dim: int | None = None

    def deciding(self, value: Tensor) -> Tensor:
        """Return the outputs that decide whether their unit is saturated."""
        if self.dim is None or value.is_complex() or not -value.dim() <= self.dim < value.dim():
            return value
        return value.detach().amax(self.dim)

    def rounded(self, dtype: torch.dtype) -> Saturation:
        """Return the same for outputs of a dtype: what cuts values off does so at numbers that the dtype has."""
        if dtype not in _ROUNDING:
            return self
        low, high = (float(torch.tensor(border, dtype=dtype, device="cpu")) for border in (self.low, self.high))
        return replace(self, low=low, high=high)

    def count(self, outputs: NDArray[np.floating]) -> int:
        """Count the outputs that are saturated."""
        with np.errstate(invalid="ignore"):
            return int(((outputs <= self.low) | (outputs >= self.high)).sum())


_SIGMOID = (1 - math.sqrt(1 - 4 * FLAT)) / 2
_FLAT_OUTPUTS = {
    "tanh": (-math.sqrt(1 - FLAT), math.sqrt(1 - FLAT)),
    "sigmoid": (_SIGMOID, 1 - _SIGMOID),
    "softsign": (math.sqrt(FLAT) - 1, 1 - math.sqrt(FLAT)),
    "softmax": (_SIGMOID, 1 - _SIGMOID),
}
"""Where the derivatives by the outputs, ``1 - y**2``, ``y * (1 - y)``, ``(1 - abs(y))**2`` and, of a softmax output by its own
input, ``y * (1 - y)``, are `FLAT`."""


def saturation(how: str, numbers: Sequence[float] = ()) -> Saturation:
    """Describe an activation by its name and what it was made with.

    Args:
        how: "tanh", "sigmoid", "softsign", "softmax" or "between".
        numbers: The dimension of a softmax; the two values at which "between" cuts off, and from where on it is flat.
    """
    low, high = numbers if how == "between" else _FLAT_OUTPUTS[how]
    return Saturation(low, high, int(numbers[0]) if how == "softmax" else None)
