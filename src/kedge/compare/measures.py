"""The distance of two values of a statistic.

# Note [Apart]
Two values are ``|a - b| / scale`` apart: 0 if they are equal to the last bit, about 1 if one is
much larger than the other, at most 2. The scale is the larger of the two sizes. For a mean these
are the root mean squares, as the mean of many numbers around zero is itself hardly more than
rounding; for an extreme the larger extremes of either side; for all others the values. A share is
compared directly. If one side alone is not finite, the distance is infinite. NaN: not measured on
both sides.

The norms of a guarded step and the sums of a measured one are added up in other orders, and their
last bits differ. So a step that is guarded in one recording and measured in the other is compared
up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np

from kedge.store.formats import FORMATS
from kedge.store.rows import Bools, Floats, Ints, Rows, Statistic

Compared = Literal["rms", "max", "min", "mean", "zero", "nonfinite", "nan", "count"]

#: The statistics that are compared; of several with the same distance the first is named.
COMPARED: tuple[Compared, ...] = get_args(Compared)

#: The statistics that do not show rounding: they count elements.
COUNTS = frozenset({"zero", "nonfinite", "nan", "count"})


#: The largest distance of the same values in a guarded step and in a measured one.
MEASURED_OTHERWISE = 2.0**-16


class ChosenRows:
    """The rows of one site in the steps that are compared."""

    def __init__(self, rows: Rows, where: Ints | slice) -> None:
        self._rows = rows
        self._where = where

    @property
    def broken(self) -> Bools:
        """Whether something was not finite, for each step."""
        return np.asarray(~self._rows.clean & (self._rows.count > 0))[self._where]

    @property
    def level(self) -> Ints:
        """The level of measurement of each step."""
        return np.asarray(self._rows.level[self._where])

    def __getitem__(self, statistic: Statistic) -> Floats:
        """Return a statistic, NaN where it was not measured."""
        return self._rows.statistic(statistic)[self._where]


def apart(a: ChosenRows, b: ChosenRows) -> Iterator[tuple[Compared, Floats]]:
    """Yield for each statistic the distance of two sites in each step; see Note [Apart]."""
    broken = a.broken
    other = b.broken
    both = broken & other
    one = broken != other
    otherwise = a.level != b.level
    extremes = _larger(a["absmax"], b["absmax"])
    sizes = {"mean": _larger(a["rms"], b["rms"]), "min": extremes, "max": extremes}
    for name in COMPARED:
        x = a[name]
        y = b[name]
        if name == "zero":
            far = np.abs(x - y)
        else:
            far = _relative(x, y, sizes.get(name))
        if both.any():
            far[both & ~(np.isfinite(x) & np.isfinite(y))] = 0.0
        if name == "nonfinite":
            far[one] = np.inf
        else:
            far[one] = np.nan
        if otherwise.any():
            far[otherwise & (far < MEASURED_OTHERWISE)] = 0.0
        yield name, far


def _larger(x: Floats, y: Floats) -> Floats:
    return np.maximum(np.abs(x), np.abs(y))


def _relative(x: Floats, y: Floats, sizes: Floats | None) -> Floats:
    scale = _larger(x, y)
    if sizes is not None:
        scale = np.fmax(scale, sizes)
    with np.errstate(invalid="ignore", divide="ignore"):
        far = np.abs(x - y) / scale
    far[x == y] = 0.0
    return far


def eps(dtype: str) -> float | None:
    """Return the relative distance of a format's neighbouring numbers.

    It is None if it is not a floating-point format.
    """
    known = FORMATS.get(dtype)
    if known is None:
        return None
    return known.smallest / known.smallest_normal


def coarser(a: str, b: str) -> str:
    """Return the coarser of two formats."""
    return max((a, b), key=lambda dtype: eps(dtype) or 0.0)
