"""Positions: the entries along one dimension of a value that are changed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kedge.errors import InterventionError
from kedge.sites import leaves

Positions: TypeAlias = int | slice | Sequence[int] | Tensor | None
"""An index, a slice, several indices, or a boolean mask; None for all."""


def mask(value: Tensor, positions: Positions, dim: int) -> Tensor:
    """Return a mask of the changed positions, in a shape that broadcasts to the value's.

    A mask of two dimensions has a row for each sample; it needs `dim` 1.

    Raises:
        InterventionError: If the value has no such positions.
    """
    if not -value.dim() <= dim < value.dim():
        raise InterventionError(
            f"positions {positions!r} in dimension {dim}: "
            f"the value is {leaves.describe(value)}, which has no such dimension"
        )
    dim %= value.dim()
    length = value.shape[dim]
    if hasattr(positions, "__array__") and not isinstance(positions, Tensor):
        positions = torch.as_tensor(positions)
    if isinstance(positions, (list, tuple)) and {type(p) for p in positions} == {bool}:
        positions = torch.tensor(positions)

    if isinstance(positions, Tensor) and positions.dtype == torch.bool:
        wanted = (length,) if positions.dim() == 1 else (value.shape[0], length)
        if tuple(positions.shape) != wanted or (positions.dim() == 2 and dim != 1):
            raise InterventionError(
                f"the mask of positions has the shape {list(positions.shape)}, "
                f"but the value is {leaves.describe(value)}: it takes [{length}], "
                "or a row of that for each sample where the positions stand in dimension 1"
            )
        chosen = positions.to(value.device)
    else:
        chosen = _marked(positions, length, value.device)
    before = [1] * (dim + 1 - chosen.dim())
    after = [1] * (value.dim() - dim - 1)
    return chosen.reshape([*before, *chosen.shape, *after])


def _marked(positions: Positions, length: int, device: torch.device) -> Tensor:
    marked = torch.zeros(length, dtype=torch.bool, device=device)
    if positions is None:
        return ~marked
    if isinstance(positions, Tensor):
        positions = positions.reshape(-1).tolist()
    if isinstance(positions, slice):
        marked[list(range(length)[positions])] = True
        return marked
    if isinstance(positions, bool):
        raise InterventionError(
            f"positions {positions}: give indices, a slice or a mask; leave them out for all"
        )
    several = positions if isinstance(positions, Sequence) else [positions]
    try:
        indices = [operator.index(i) for i in several]
    except TypeError as error:
        raise InterventionError(
            f"positions {positions!r}: they are counted in whole numbers"
        ) from error
    if not all(-length <= i < length for i in indices):
        raise InterventionError(f"positions {positions!r}: there are {length} here, counted from 0")
    marked[indices] = True
    return marked
