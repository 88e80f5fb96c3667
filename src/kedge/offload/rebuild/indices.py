"""64-bit indices in as many bits as they need.

# Note [Pool indices]
Pooling saves, for each window, where in the plane its largest value lay. The window's own place is known:
it goes on by the same number of elements from window to window along each dimension. What is left is the
place in the window, which needs a byte as long as a window spans 256 elements of the plane. The steps are
read off the indices themselves, from averages over windows next to one another, so nothing need be known
of the pooling: padding or a rounded-up last window only make the rest a bit larger. If it is larger than a
byte but takes few values, as in windows of several rows of a wide plane, these are numbered.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_FORMATS = ((torch.uint8, 1 << 8), (torch.uint16, 1 << 16), (torch.int32, 1 << 31))
_HALF = 1 << 30


class NarrowCode(NamedTuple):
    """How short codes become indices: by a table or as they are, plus a smallest one, plus steps along the dimensions."""

    least: int
    steps: tuple[int, ...]
    table: Tensor | None


def narrow(whole: Tensor) -> tuple[Tensor, NarrowCode] | None:
    """Encode dense 64-bit integers in fewer bits; None if they need more than half of theirs."""
    if not whole.numel():
        return None
    least, most = _ends(whole)
    if not -_HALF < least <= most < _HALF:
        return None
    steps, table = _fit(whole), None
    short = whole.to(torch.int32)
    if any(steps) and abs(sum(step * size for step, size in zip(steps, whole.shape[-3:], strict=True))) < _HALF:
        rest = short - _ramp(whole, steps)
        ends = _ends(rest)
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
    """Undo `narrow`."""
    whole = codes.to(torch.int64) if how.table is None else how.table[codes.to(torch.int32)]
    whole += how.least
    return whole.add_(_ramp(whole, how.steps)) if how.steps else whole


def _ends(whole: Tensor) -> tuple[int, int]:
    least, most = torch.aminmax(whole)
    return int(least), int(most)


def _numbered(codes: Tensor, span: int) -> tuple[Tensor, Tensor | None]:
    """Number the values that occur, if a byte is enough for that."""
    occurs = torch.zeros(span, dtype=torch.bool, device=codes.device)
    occurs[codes.reshape(-1)] = True
    table = occurs.nonzero().reshape(-1)
    if len(table) > 1 << 8:
        return codes, None
    number = torch.zeros(span, dtype=torch.uint8, device=codes.device)
    number[table] = torch.arange(len(table), dtype=torch.uint8, device=codes.device)
    return number[codes], table


def _fit(whole: Tensor) -> tuple[int, ...]:
    """Find the step along each of the last three dimensions; the ends are left out, as windows are cut there."""
    steps = []
    for dim in range(max(0, whole.dim() - 3), whole.dim()):
        count = whole.size(dim)
        ends = (1, count - 2) if count > 4 else (0, count - 1)
        if ends[1] <= ends[0]:
            steps.append(0)
            continue
        first, last = whole.select(dim, ends[0]).double().mean(), whole.select(dim, ends[1]).double().mean()
        steps.append(round(float(last - first) / (ends[1] - ends[0])))
    return tuple(steps)


def _ramp(whole: Tensor, steps: tuple[int, ...]) -> Tensor:
    """Return the place of each window, as far as it follows from the steps."""
    ramp = torch.zeros([1] * len(steps), dtype=torch.int32, device=whole.device)
    for place, step in enumerate(steps):
        shape = [1] * len(steps)
        shape[place] = -1
        ramp = ramp + (
            torch.arange(whole.size(place - len(steps)), dtype=torch.int32, device=whole.device) * step
        ).reshape(shape)
    return ramp
