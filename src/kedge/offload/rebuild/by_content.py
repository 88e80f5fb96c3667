"""Tensors of low information: masks, noise of two values, indices of a narrow range.

# Note [Pool indices]
Pooling saves, for each window, the place of its largest value in the plane. The window's own place
is known: it advances by the same number of elements from window to window along each dimension. The
rest is the place in the window, which needs a byte as long as a window spans at most 256 elements
of the plane. `narrow` computes the steps from the indices themselves, from averages over
neighbouring windows, so it needs no knowledge of the pooling: padding or a rounded-up last window
only make the rest a bit larger. If the rest is larger than a byte but takes few values, as in
windows of several rows of a wide plane, `narrow` numbers these values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kedge.offload.rebuild.recipe import Term

_IN_A_BYTE = 1 << 8
_IN_TWO_BYTES = 1 << 16
_FORMATS = ((torch.uint8, _IN_A_BYTE), (torch.uint16, _IN_TWO_BYTES), (torch.int32, 1 << 31))
_HALF = 1 << 30
_INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_HEAD = 4096
_PIECE = 1 << 16

Found = tuple[str, Tensor, Term]


def by_content(whole: Tensor) -> Found | None:
    """Return a shorter form of a dense tensor: the rule, the bytes, and the term that decodes them.

    Returns:
        None if there is none.
    """
    flat = whole.as_strided((whole.numel(),), (1,), 0)
    if whole.dtype == torch.bool:
        return "bits", pack(flat), partial(_mask, tuple(whole.size()), whole.stride())
    if whole.dtype == torch.int64:
        found = narrow(whole)
        if found is None:
            return None
        codes, how = found
        return "narrow_integers", codes, partial(_integers, how)
    if whole.is_floating_point() and whole.device.type == "cpu":
        return _of_two_values(whole, flat)
    return None


def pack(mask: Tensor) -> Tensor:
    """Return booleans, eight in a byte."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))
    return pack_there(mask)


def pack_there(mask: Tensor) -> Tensor:
    """Return what `pack` does, by tensor operations: for devices that NumPy does not reach."""
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8))
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded.reshape(-1, 8) << shifts).sum(1, dtype=torch.uint8)


def unpack(bits: Tensor, count: int) -> Tensor:
    """Return the first booleans that `pack` encoded."""
    if bits.device.type == "cpu":
        ones = np.unpackbits(bits.numpy(), count=count, bitorder="little")
        return torch.from_numpy(ones.view(np.bool_))
    return unpack_there(bits, count)


def unpack_there(bits: Tensor, count: int) -> Tensor:
    """Return what `unpack` does, by tensor operations: for devices that NumPy does not reach."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    apart = (bits[:, None] >> shifts) & 1
    return apart.reshape(-1)[:count].to(torch.bool)


def _mask(size: tuple[int, ...], stride: tuple[int, ...], inputs: Sequence[Tensor]) -> Tensor:
    return unpack(inputs[-1], int(np.prod(size))).as_strided(size, stride)


def _integers(how: Any, inputs: Sequence[Tensor]) -> Tensor:
    return expand(how, inputs[-1])


def _of_two_values(whole: Tensor, flat: Tensor) -> Found | None:
    """Return a tensor of two values, such as the noise of dropout, as bits.

    Returns:
        None if it has more than two, or 4096 equal first ones.
    """
    values = flat.view(torch.uint8).numpy().view(_INTEGERS[whole.element_size()])
    head = values[:_HEAD]
    others = head[head != head[0]]
    if not others.size or (others != others[0]).any():
        return None

    low = head[0]
    high = others[0]
    bits = _pack_two(values, low, high)
    if bits is None:
        return None
    every_byte = np.arange(256, dtype=np.uint8)[:, None]
    are_high = np.unpackbits(every_byte, axis=1, bitorder="little") == 1
    table = np.where(are_high, high, low).astype(values.dtype)
    return "two_values", torch.from_numpy(bits), _TwoValues(table, whole)


def _pack_two(values: Any, low: Any, high: Any) -> Any:
    """Return a bit for each value, 1 for the high one; None if there is a third value."""
    count = values.size
    bits = np.empty((count + 7) // 8, np.uint8)
    are_low = np.empty(_PIECE, np.bool_)  # pieces of a cache's size
    are_high = np.empty(_PIECE, np.bool_)
    for start in range(0, count, _PIECE):
        piece = values[start : start + _PIECE]
        lows = np.equal(piece, low, out=are_low[: piece.size])
        highs = np.equal(piece, high, out=are_high[: piece.size])
        if np.count_nonzero(lows) + np.count_nonzero(highs) != piece.size:
            return None
        bits[start // 8 : (start + _PIECE) // 8] = np.packbits(highs, bitorder="little")
    return bits


class _TwoValues:
    """The term that decodes a tensor of two values from its bits."""

    __slots__ = ("_dtype", "_size", "_stride", "_table")

    def __init__(self, table: Any, whole: Tensor) -> None:
        self._table = table
        self._dtype = whole.dtype
        self._size = whole.size()
        self._stride = whole.stride()

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        count = self._size.numel()
        eighths, rest = divmod(count, 8)
        made = np.empty(count, self._table.dtype)
        bits = inputs[-1].numpy()
        target = made[: count - rest].reshape(-1, 8)
        np.take(self._table, bits[:eighths], axis=0, out=target, mode="clip")
        if rest:
            made[count - rest :] = self._table[bits[eighths]][:rest]
        return torch.from_numpy(made).view(self._dtype).as_strided(self._size, self._stride)


class NarrowCode(NamedTuple):
    """The way from short codes to indices.

    An index is the code's entry in the table, if there is one, plus the smallest index, plus the
    steps along the dimensions.
    """

    least: int
    steps: tuple[int, ...]
    table: Tensor | None


def narrow(whole: Tensor) -> tuple[Tensor, NarrowCode] | None:
    """Return dense 64-bit integers in fewer bits; None if they need more than half of their bits."""
    if not whole.numel():
        return None
    least, most, steps = _range(whole)
    if not -_HALF < least <= most < _HALF:
        return None

    short = whole.to(torch.int32)
    used: tuple[int, ...] = ()
    reach = sum(step * size for step, size in zip(steps, whole.shape[-3:], strict=True))
    if any(steps) and abs(reach) < _HALF:
        rest = short - _ramp(whole, steps)
        low, high = (int(end) for end in torch.stack(torch.aminmax(rest)).tolist())
        if high - low < most - least:
            short = rest
            least = low
            most = high
            used = steps

    codes = short.sub_(least)
    span = most - least
    table = None
    if _IN_A_BYTE <= span < _IN_TWO_BYTES:
        codes, table = _numbered(codes, span + 1)
        if table is not None:
            span = len(table) - 1
    dtype = next(dtype for dtype, count in _FORMATS if span < count)
    return codes.to(dtype), NarrowCode(least, used, table)


def expand(how: NarrowCode, codes: Tensor) -> Tensor:
    """Return the integers that `narrow` encoded."""
    table = how.table
    whole = codes.to(torch.int64) if table is None else table[codes.to(torch.int32)]
    whole += how.least
    if how.steps:
        whole += _ramp(whole, how.steps)
    return whole


def _numbered(codes: Tensor, span: int) -> tuple[Tensor, Tensor | None]:
    """Return the numbers of the occurring values, and the values.

    If a byte is not enough for a number, returns the codes and None.
    """
    occurs = torch.zeros(span, dtype=torch.bool, device=codes.device)
    occurs[codes.reshape(-1)] = True
    table = occurs.nonzero().reshape(-1)
    if len(table) > _IN_A_BYTE:
        return codes, None
    number = torch.zeros(span, dtype=torch.uint8, device=codes.device)
    number[table] = torch.arange(len(table), dtype=torch.uint8, device=codes.device)
    return number[codes], table


def _range(whole: Tensor) -> tuple[int, int, tuple[int, ...]]:
    """Return the smallest and the largest index, and the step along each of the last three dimensions.

    The ends of a dimension, where windows may be cut off, do not count for its step. All is read at
    once: each read of a device's memory waits for the device.
    """
    ends = []
    planes = []
    for dim in range(-len(whole.shape[-3:]), 0):
        count = whole.shape[dim]
        first, last = (1, count - 2) if count > 4 else (0, count - 1)
        ends.append((first, last))
        planes += [whole.select(dim, first), whole.select(dim, last)]

    numbers = [*torch.aminmax(whole), *(plane.sum() for plane in planes)]
    least, most, *sums = torch.stack(numbers).tolist()
    steps = []
    for i, (first, last) in enumerate(ends):
        step = 0
        if last > first:
            difference = (sums[2 * i + 1] - sums[2 * i]) / planes[2 * i].numel()  # of the means
            step = round(difference / (last - first))
        steps.append(step)
    return least, most, tuple(steps)


def _ramp(whole: Tensor, steps: tuple[int, ...]) -> Tensor:
    """Return the part of each window's place that follows from the steps."""
    ramp = torch.zeros([1] * len(steps), dtype=torch.int32, device=whole.device)
    for place, step in enumerate(steps):
        shape = [1] * len(steps)
        shape[place] = -1
        count = whole.size(place - len(steps))
        places = torch.arange(count, dtype=torch.int32, device=whole.device)
        ramp = ramp + (places * step).reshape(shape)
    return ramp
