"""Activations that saturate: which of their outputs lie where hardly any gradient passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

FLAT = 1e-3
"""The slope below which an output counts as saturated: a thousandth of what the identity passes back."""

Values = NDArray[Any]


@dataclass(frozen=True)
class Saturation:
    """How an activation saturates.

    Attributes:
        slope: The activation's derivative, from its outputs.
        dim: The dimension whose largest output decides, where outputs compete as those of a softmax do.
    """

    slope: Callable[[Values], Values]
    dim: int | None = None

    def deciding(self, value: Tensor) -> Tensor:
        """Return the outputs that decide whether their unit is saturated."""
        if self.dim is None or not -value.dim() <= self.dim < value.dim():
            return value
        return value.detach().amax(self.dim)

    def saturated(self, drawn: Values) -> NDArray[np.bool_]:
        """Tell which of some outputs are saturated; NaN is not."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.abs(self.slope(drawn)) < FLAT)


def saturation(how: str, numbers: Sequence[float] = ()) -> Saturation:
    """Describe an activation by its name and what it was made with.

    Args:
        how: "tanh", "sigmoid", "softsign", "softmax" or "between".
        numbers: The dimension of a softmax; the two values at which "between" cuts off.
    """
    if how == "between":
        return Saturation(between(*numbers))
    if how == "softmax":
        return Saturation(sigmoid, int(numbers[0]))
    return Saturation({"tanh": tanh, "sigmoid": sigmoid, "softsign": softsign}[how])


def tanh(y: Values) -> Values:
    """Derivative of the hyperbolic tangent: ``1 - y**2``."""
    return np.asarray(1 - np.square(y))


def sigmoid(y: Values) -> Values:
    """Derivative of the logistic function, and of a softmax output by its own input: ``y * (1 - y)``."""
    return np.asarray(y * (1 - y))


def softsign(y: Values) -> Values:
    """Derivative of ``x / (1 + abs(x))``: ``(1 - abs(y))**2``."""
    return np.asarray(np.square(1 - np.abs(y)))


def between(low: float, high: float) -> Callable[[Values], Values]:
    """Derivative of a function that is cut off at two values: 1 between them, 0 at them."""

    def slope(y: Values) -> Values:
        return np.asarray(np.where((y <= low) | (y >= high), 0.0, 1.0))

    return slope
