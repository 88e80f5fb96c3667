"""Where two outputs of a model differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROUNDING = 1e-4
"""The relative difference of two numbers that another order of additions may make."""
SMALL = 1e-6
"""The same of a number near zero, as a share of the usual magnitude."""


def numbers_in(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of real numbers, detached."""
    return {
        name: value.detach()
        for name, value in outputs.items()
        if value.is_floating_point() and value.layout is torch.strided and value.numel() > 0
    }


def differ(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether outputs differ in their names, their shapes, or a number: on a CPU, in any bit of it.

    There the same operations on numbers that differ little may give nearly the same, and the same
    operations on the same numbers give the same bits.
    """
    if first.keys() != second.keys():
        return True
    for name, value in first.items():
        other = second[name]
        if value.shape != other.shape:
            return True
        compare = _apart if value.is_cpu else changed
        if bool(compare(value, other).any()):
            return True
    return False


def same_values(first: Any, second: Any) -> bool:
    """Whether two samples, or parts of them, hold the same numbers."""
    if isinstance(first, Tensor | np.ndarray):
        one, other = torch.as_tensor(first), torch.as_tensor(second)
        return one.shape == other.shape and not bool(_apart(one, other).any())
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same_values, first, second))
    return bool(first == second)


def changed(first: Tensor, second: Tensor) -> Tensor:
    """Return where two tensors differ by more than rounding; if their shapes do, everywhere in the first."""
    if first.shape != second.shape:
        return torch.ones_like(first, dtype=torch.bool)
    apart = _apart(first, second)
    one, other = first.double(), second.double()
    usual = torch.nan_to_num(one.abs(), nan=0.0, posinf=0.0).median()
    size = torch.maximum(one.abs(), other.abs())
    is_rounding = (one - other).abs() <= ROUNDING * size + SMALL * usual
    return apart & ~is_rounding


def _apart(first: Tensor, second: Tensor) -> Tensor:
    return (first != second) & ~(first.isnan() & second.isnan())
