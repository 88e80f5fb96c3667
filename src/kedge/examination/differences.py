"""Whether two outputs of a model differ, by more than the rounding of another order of additions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ROUNDING = 1e-5
"""The difference, as a share of the largest magnitude of an output, up to which two are the same."""


def numbers_in(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of real numbers, detached."""
    return {
        name: value.detach()
        for name, value in outputs.items()
        if value.is_floating_point() and value.layout is torch.strided and value.numel() > 0
    }


def differ(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether outputs differ in their names, their shapes, or a number."""
    if first.keys() != second.keys():
        return True
    return any(bool(changed(value, second[name]).any()) for name, value in first.items())


def changed(first: Tensor, second: Tensor) -> Tensor:
    """Return where two tensors differ; if their shapes do, that is everywhere in the first."""
    if first.shape != second.shape:
        return torch.ones_like(first, dtype=torch.bool)
    one, other = first.double(), second.double()
    largest = torch.nan_to_num(one.abs(), nan=0.0, posinf=0.0).max()
    apart = (one - other).abs() > ROUNDING * largest
    return apart | (one.isfinite() != other.isfinite())
