"""Activations that saturate, and their outputs at which hardly any gradient passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FLAT = 1e-3
"""The slope below which an output counts as saturated: a thousandth of the identity's slope."""

_ROUNDING = frozenset({torch.float16, torch.bfloat16, torch.float32})


@dataclass(frozen=True)
class Saturation:
    """The outputs at which an activation is flat: those up to `low`, and those from `high` on.

    NaN is not flat.

    Attributes:
        low: The lower limit.
        high: The upper limit.
        dim: The dimension whose largest output decides, if outputs compete like those of a softmax;
            else None.
    """

    low: float
    high: float
    dim: int | None = None

    def deciding(self, value: Tensor) -> Tensor:
        """Return the outputs that decide on saturation: the largest along `dim`, or all."""
        if self.dim is None or value.is_complex() or not -value.dim() <= self.dim < value.dim():
            return value
        return value.detach().amax(self.dim)

    def rounded(self, dtype: torch.dtype) -> Saturation:
        """Return the same with limits rounded to a dtype, where an activation cuts values off."""
        if dtype not in _ROUNDING:
            return self
        low, high = torch.tensor([self.low, self.high], dtype=dtype, device="cpu").tolist()
        return replace(self, low=low, high=high)

    def count(self, outputs: NDArray[np.floating]) -> int:
        """Return the number of saturated outputs."""
        with np.errstate(invalid="ignore"):
            return int(((outputs <= self.low) | (outputs >= self.high)).sum())


_SIGMOID = (1 - math.sqrt(1 - 4 * FLAT)) / 2
_FLAT_OUTPUTS = {
    "tanh": (-math.sqrt(1 - FLAT), math.sqrt(1 - FLAT)),
    "sigmoid": (_SIGMOID, 1 - _SIGMOID),
    "softsign": (math.sqrt(FLAT) - 1, 1 - math.sqrt(FLAT)),
    "softmax": (_SIGMOID, 1 - _SIGMOID),
}
"""The outputs at which the derivative is `FLAT`.

It is ``1 - y**2``, ``y * (1 - y)``, ``(1 - abs(y))**2`` and, for a softmax output by its own input,
``y * (1 - y)``.
"""


def saturation(how: str, numbers: Sequence[float] = ()) -> Saturation:
    """Return the saturation of an activation, given its name and arguments.

    Args:
        how: "tanh", "sigmoid", "softsign", "softmax" or "between".
        numbers: For "softmax" its dimension; for "between" the lower and the upper output at which
            it becomes flat.
    """
    if how == "between":
        low, high = numbers
        return Saturation(low, high)
    low, high = _FLAT_OUTPUTS[how]
    if how == "softmax":
        return Saturation(low, high, int(numbers[0]))
    return Saturation(low, high)
