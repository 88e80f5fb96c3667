"""Numbers over the steps as one line of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from kedge.store.rows import Bools, Floats

BLOCKS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "✗"
ZERO = "0"
GAP = " "
BAD = "bold red"
"""The style of what is not finite."""

#: The least height of a picture in powers of ten, so that noise does not look like a change.
LEAST_DECADES = 1.0


def sparkline(
    values: Floats, broken: Bools, width: int, ends: tuple[float, float] | None = None
) -> str:
    """Return values as one line of blocks on a logarithmic scale.

    Each character is the largest of its steps; steps with non-finite values are crosses, steps
    with only zeros are ``0``, and steps without a value are gaps.

    Args:
        values: One for each step, NaN where there is none.
        broken: Whether a value was non-finite, for each step.
        width: The most characters.
        ends: The values of the lowest and of the highest block; those of the values if None.
    """
    values = binned(values, width)
    broken = binned(broken, width, np.logical_or)
    with np.errstate(divide="ignore"):
        logs = np.log10(values)
    drawn = np.isfinite(logs) & ~broken
    cells = np.where(values == 0, ZERO, GAP).astype(object)
    cells[drawn] = [BLOCKS[level] for level in _levels(logs[drawn], ends)]
    cells[broken] = NOT_FINITE
    return "".join(cells)


def coloured(blocks: str, style: str) -> Text:
    """Return blocks in a style, and their crosses in that of what is not finite."""
    text = Text(blocks, style)
    text.highlight_regex(f"{NOT_FINITE}+", BAD)
    return text


def drawable(values: Floats, *, linearly: bool = False) -> Floats:
    """Return values for a line of blocks: if one is negative, they are drawn linearly.

    So the line rises where they do.

    Args:
        values: The values.
        linearly: Whether they are drawn so in any case.
    """
    known = values[np.isfinite(values)]
    if len(known) and (linearly or known.min() < 0):
        return linear(values, known.min(), known.max())
    return values


def linear(values: Floats, low: float, high: float) -> Floats:
    """Return values, some of them negative, such that a logarithmic scale draws them linearly."""
    return np.asarray(10 ** ((values - low) / ((high - low) or 1.0)))


def _levels(logs: Floats, ends: tuple[float, float] | None) -> list[int]:
    if not len(logs):
        return []
    low, high = logs.min(), logs.max()
    if ends is not None:
        low, high = np.log10(ends)
    top = len(BLOCKS) - 1
    if high - low >= LEAST_DECADES:
        heights = (logs - low) / (high - low) * top
    else:
        # Centred on a block: half a block up or down is still a flat line.
        heights = (logs - (low + high) / 2) / LEAST_DECADES * top + top // 2
    return [int(level) for level in np.rint(heights)]


def binned(values: NDArray[Any], width: int, fold: np.ufunc = np.fmax) -> NDArray[Any]:
    """Return at most so many values, each the fold of neighbouring ones: by default the largest."""
    if len(values) <= width:
        return values
    return np.asarray(fold.reduceat(values, np.arange(width) * len(values) // width))
