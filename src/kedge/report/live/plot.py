"""A curve in braille: each character is two dots wide and four high."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kedge.report.sparkline import binned
from kedge.store.rows import Floats

EMPTY = 0x2800
#: The bits of a braille character's dots, by row and column.
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.int64)

#: A curve that spans more than this many times its least value is drawn on a logarithmic scale.
LOGARITHMIC_FROM = 20.0


@dataclass(frozen=True)
class Plot:
    """A drawn curve.

    Attributes:
        rows: Its lines, the highest first.
        low: The value at the bottom.
        high: The value at the top.
        logarithmic: Whether the scale is logarithmic.
    """

    rows: tuple[str, ...]
    low: float
    high: float
    logarithmic: bool


def plot(values: Floats, width: int, height: int) -> Plot | None:
    """Return a curve.

    Values that share a column of dots are drawn from the least to the largest of them.

    Args:
        values: One for each step; a non-finite value leaves a gap.
        width: In characters.
        height: In characters.

    Returns:
        None if there is no finite value.
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low = float(finite.min())
    high = float(finite.max())
    logarithmic = low > 0 and high > LOGARITHMIC_FROM * low

    gapped = np.where(np.isfinite(values), values, np.nan)
    least, most = _connected(*_columns(gapped, 2 * width))
    tops = _heights(most, (low, high), logarithmic, 4 * height)
    bottoms = _heights(least, (low, high), logarithmic, 4 * height)
    dots = np.zeros((4 * height, 2 * width), dtype=np.int64)
    for column in np.flatnonzero(~np.isnan(most)).tolist():
        dots[4 * height - 1 - tops[column] : 4 * height - bottoms[column], column] = 1

    bits = dots.reshape(height, 4, width, 2) * DOTS[None, :, None, :]
    cells = bits.sum(axis=(1, 3)) + EMPTY
    rows = tuple("".join(map(chr, row)) for row in cells.tolist())
    return Plot(rows, low, high, logarithmic)


def _columns(values: Floats, many: int) -> tuple[Floats, Floats]:
    """Return the least and the largest value for each column of dots; NaN for a gap."""
    if len(values) <= many:
        # Few steps are spread over the width, each as a level piece.
        places = np.arange(many) * len(values) // many
        return values[places], values[places]
    return binned(values, many, np.fmin), binned(values, many)


def _connected(least: Floats, most: Floats) -> tuple[Floats, Floats]:
    """Return the columns extended to the end of the one before, so that the curve has no gaps."""
    before_least = np.append(np.nan, least[:-1])
    before_most = np.append(np.nan, most[:-1])
    down_to = np.where(before_most < least, before_most, np.nan)
    up_to = np.where(before_least > most, before_least, np.nan)
    return np.fmin(least, down_to), np.fmax(most, up_to)


def _heights(
    values: Floats, ends: tuple[float, float], logarithmic: bool, dots: int
) -> NDArray[np.int64]:
    low, high = ends
    if low == high:
        return np.full(len(values), dots // 2)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if logarithmic:
            share = (np.log10(values) - np.log10(low)) / (np.log10(high) - np.log10(low))
        else:
            # Halved first: the distance between the largest numbers of both signs overflows.
            share = (values / 2 - low / 2) / (high / 2 - low / 2)
    return np.asarray(np.rint(np.nan_to_num(share) * (dots - 1)), dtype=np.int64)
