"""The reductions behind `measure` on a device, and which tensors they apply to.

On a GPU every reduction runs at memory speed, and reading a sum to decide whether to count would
wait for it; so all run. On devices of CUDA and ROCm and in this process's own memory `kedge.native`
measures what it can instead, and where Triton is there, `kedge.native.on_device` does with one
kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kedge.native.reductions import DRAWN
from kedge.store.exponents import spacing
from kedge.torch_internals import modes

STATISTICS = ("sum", "sumsq", "min", "max", "nonzero", "nonfinite", "nan")
"""The statistics of a row. In a row on the host, the number of elements follows them."""
_HALF = frozenset({torch.float16, torch.bfloat16})
_COUNTED = _HALF | {torch.float32, torch.float64}
_NARROW = frozenset(dtype for name, dtype in vars(torch).items() if name.startswith("float8_"))


class StatisticsRow:
    """One row of a table on a device: a scalar tensor for each statistic, to write to."""

    __slots__ = STATISTICS

    def __init__(self, row: Tensor) -> None:
        self.sum, self.sumsq, self.min, self.max, self.nonzero, self.nonfinite, self.nan = (
            row.unbind()
        )


def measurable(value: Tensor) -> bool:
    """Return whether a tensor holds numbers that can be summed on its device."""
    dtype = value.dtype
    numbers = dtype in _COUNTED or dtype.is_complex or dtype in _NARROW
    there = value.layout is torch.strided and not value.is_nested
    return numbers and there and modes.has_data(value) and value.numel() > 0


def transforms(value: Tensor) -> bool:
    """Return whether a transform of `torch.func`, a trace, or a mode in which tensors hold no data is active.

    A batch of gradients counts as a transform.
    """
    return (
        modes.is_transforming()
        or modes.is_batched(value)
        or modes.is_fake(value)
        or modes.is_captured()
    )


@contextmanager
def plainly() -> Iterator[None]:
    """Suspend active transforms, modes and traces, so that they do not include measuring.

    Transforms refuse to write to tensors that they did not make, fake tensors hold no data, and a
    traced graph would contain Kedge's operations, and write to its tables at each run.
    """
    if not modes.is_transforming() and not modes.dispatch_modes():
        yield
        return
    with modes.without_transforms(), modes.plainly():
        yield


def norm(x: Tensor, slot: StatisticsRow) -> None:
    """Write the sum of squares, which may overflow, and the sum, finite if every element is."""
    if x.dtype is slot.sumsq.dtype:
        torch.dot(x, x, out=slot.sumsq)
    else:
        slot.sumsq.copy_(_squares(x))
    finite(x, slot)


def finite(x: Tensor, slot: StatisticsRow) -> None:
    """Write the sum, which is finite if every element is."""
    if x.dtype is slot.sum.dtype:
        torch.sum(x, 0, out=slot.sum)
    elif x.dtype in _HALF:
        slot.sum.copy_(x.sum(dtype=torch.float32))
    else:
        slot.sum.copy_(x.sum())


def full(x: Tensor, slot: StatisticsRow) -> None:
    """Write every statistic."""
    norm(x, slot)
    if x.dtype is slot.min.dtype:
        torch.amin(x, 0, out=slot.min)
        torch.amax(x, 0, out=slot.max)
    else:
        slot.min.copy_(x.amin())
        slot.max.copy_(x.amax())
    slot.nonzero.copy_(torch.count_nonzero(x))
    # Zero if finite, else NaN: two kernels, where `isfinite` takes four.
    slot.nonfinite.copy_(torch.count_nonzero(x - x))
    slot.nan.copy_(torch.count_nonzero(x != x))  # noqa: PLR0124 - only NaN differs from itself


def drawn(x: Tensor) -> Tensor:
    """Return up to 256 evenly spaced elements of a flat tensor."""
    return x[:: spacing(x.numel(), DRAWN)]


def channels(value: Tensor, dim: int) -> Tensor:
    """Return the largest value of each channel."""
    others = [d for d in range(value.dim()) if d != dim % value.dim()]
    value = value.detach()
    if not others:
        return value
    return torch.amax(value, dim=others)


def _squares(x: Tensor) -> Tensor:
    if x.dtype in _HALF:
        root: Tensor = torch.linalg.vector_norm(x, dtype=torch.float32)
        return root.square()
    return torch.dot(x, x)
