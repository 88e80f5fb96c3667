"""64-bit indices, stored in as few bits as they need.

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

from typing import NamedTuple

import torch
from torch import Tensor

_FORMATS = ((torch.uint8, 1 << 8), (torch.uint16, 1 << 16), (torch.int32, 1 << 31))
_HALF = 1 << 30


class NarrowCode(NamedTuple):
    """The way from short codes to indices: a table, if any, plus the smallest index, plus steps along the dimensions."""

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
    table = None
    short = whole.to(torch.int32)
    if (
        any(steps)
        and abs(sum(step * size for step, size in zip(steps, whole.shape[-3:], strict=True)))
        < _HALF
    ):
        rest = short - _ramp(whole, steps)
        ends = [int(end) for end in torch.stack(torch.aminmax(rest)).tolist()]
        if ends[1] - ends[0] < most - least:
            short, (least, most) = rest, ends
        else:
            steps = ()
    else:
        steps = ()
    codes = short.sub_(least)
    span = most - least
    if _FORMATS[0][1] <= span < _FORMATS[1][1]:
        codes, table = _numbered(codes, span + 1)
        span = span if table is None else len(table) - 1
    dtype = next(dtype for dtype, count in _FORMATS if span < count)
    return codes.to(dtype), NarrowCode(least, steps, table)


def expand(how: NarrowCode, codes: Tensor) -> Tensor:
    """Return the integers that `narrow` encoded."""
    whole = codes.to(torch.int64) if how.table is None else how.table[codes.to(torch.int32)]
    whole += how.least
    return whole.add_(_ramp(whole, how.steps)) if how.steps else whole


def _numbered(codes: Tensor, span: int) -> tuple[Tensor, Tensor | None]:
    """Return the numbers of the occurring values, and the values, if a byte is enough; otherwise the codes and None."""
    occurs = torch.zeros(span, dtype=torch.bool, device=codes.device)
    occurs[codes.reshape(-1)] = True
    table = occurs.nonzero().reshape(-1)
    if len(table) > 1 << 8:
        return codes, None
    number = torch.zeros(span, dtype=torch.uint8, device=codes.device)
    number[table] = torch.arange(len(table), dtype=torch.uint8, device=codes.device)
    return number[codes], table


def _range(whole: Tensor) -> tuple[int, int, tuple[int, ...]]:
    """Return the smallest and the largest index, and the step along each of the last three dimensions.

    The ends of a dimension, where windows may be cut off, do not count for its step. All is read at
    once: each read of a device's memory waits for the device.
    """
    ends = [_ends(count) for count in whole.shape[-3:]]
    planes = [
        whole.select(dim, place)
        for dim, pair in zip(range(-len(ends), 0), ends, strict=True)
        for place in pair
    ]
    least, most, *sums = torch.stack(
        [*torch.aminmax(whole), *(plane.sum() for plane in planes)]
    ).tolist()
    steps = []
    for i, (first, last) in enumerate(ends):
        difference = (sums[2 * i + 1] - sums[2 * i]) / planes[2 * i].numel()  # of the means
        steps.append(round(difference / (last - first)) if last > first else 0)
    return least, most, tuple(steps)


def _ends(count: int) -> tuple[int, int]:
    """Return the places from which the step along a dimension is computed."""
    return (1, count - 2) if count > 4 else (0, count - 1)


def _ramp(whole: Tensor, steps: tuple[int, ...]) -> Tensor:
    """Return the part of each window's place that follows from the steps."""
    ramp = torch.zeros([1] * len(steps), dtype=torch.int32, device=whole.device)
    for place, step in enumerate(steps):
        shape = [1] * len(steps)
        shape[place] = -1
        ramp = ramp + (
            torch.arange(whole.size(place - len(steps)), dtype=torch.int32, device=whole.device)
            * step
        ).reshape(shape)
    return ramp
