"""The rows of one site: how several merge into one, and what is derived from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Statistic = Literal["mean", "rms", "std", "absmax", "min", "max", "zero", "nonfinite", "count"]

STATISTICS: tuple[Statistic, ...] = ("mean", "rms", "std", "absmax", "min", "max", "zero", "nonfinite", "count")

FULL = 2
FINITENESS = 1


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one site, one per step, in the order of steps.

    ``sum``, ``sumsq``, ``min`` and ``max`` are NaN where they were not measured or where an
    element was NaN; ``nonzero`` and ``nonfinite`` are -1 where they were not measured.
    ``level`` is 2 for full statistics and 1 where only finiteness was checked. ``active``
    holds one packed bit per channel (``numpy.packbits``), or nothing where it was not tracked.
    """

    step: Ints
    level: Ints
    calls: Ints
    count: Ints
    sum: Floats
    sumsq: Floats
    min: Floats
    max: Floats
    nonzero: Ints
    nonfinite: Ints
    active: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.step)

    @property
    def clean(self) -> Bools:
        """Where it is known that every element was finite."""
        return clean(self.count, self.sum, self.sumsq, self.min, self.max, self.nonfinite)

    def statistic(self, name: str) -> Floats:
        """Derive one statistic for every row.

        Args:
            name: One of ``STATISTICS``. ``zero`` is the share of elements that are exactly zero,
                ``nonfinite`` and ``count`` are numbers of elements.

        Returns:
            One value per row, NaN where it was not measured.
        """
        if name not in STATISTICS:
            raise ValueError(f"{name!r} is not a statistic of a recording; there are {', '.join(STATISTICS)}")
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            return np.asarray(_DERIVED[name](self), dtype=np.float64)


def clean(count: Ints, total: Floats, sumsq: Floats, low: Floats, high: Floats, nonfinite: Ints) -> Bools:
    """Tell rows whose elements are known to be finite from the others.

    A NaN or infinite element makes the sum, the sum of squares and one of the extremes not
    finite. So one finite value shows that a NaN beside it means "not measured".
    """
    known = np.isfinite(total) | np.isfinite(sumsq) | (np.isfinite(low) & np.isfinite(high))
    return np.asarray(known & (nonfinite <= 0) | (nonfinite == 0) | (count == 0))


def merge(columns: Mapping[str, NDArray[Any]], active: Sequence[bytes]) -> Rows:
    """Put the rows of one site in the order of steps, and make one of those that share a step.

    Args:
        columns: The numeric columns of the rows, in any order.
        active: The packed channel bits of each row.
    """
    step = columns["step"]
    if np.any(step[1:] <= step[:-1]):
        order = np.argsort(step, kind="stable")
        ordered = {name: values[order] for name, values in columns.items()}
        starts = np.flatnonzero(np.diff(ordered["step"], prepend=ordered["step"][0] - 1))
        columns, active = _reduce(ordered, starts), _reduce_bits([active[i] for i in order], starts)
    numbers: dict[str, Any] = {name: _number(values) for name, values in columns.items() if name != "site"}
    return Rows(**numbers, active=tuple(active))


def _number(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.float64 if values.dtype.kind == "f" else np.int64, copy=False)


def _reduce(columns: Mapping[str, NDArray[Any]], starts: Ints) -> dict[str, NDArray[Any]]:
    """Merge groups of rows, each from one of ``starts`` to the next."""
    c = columns
    known = clean(c["count"], c["sum"], c["sumsq"], c["min"], c["max"], c["nonfinite"])
    merged: dict[str, NDArray[Any]] = {"step": c["step"][starts], "level": np.maximum.reduceat(c["level"], starts)}
    merged["calls"] = np.add.reduceat(c["calls"].astype(np.int64), starts)
    merged["count"] = np.add.reduceat(c["count"], starts)
    with np.errstate(invalid="ignore", over="ignore"):
        for name, ufunc, neutral in _FLOATS:
            merged[name] = _reduce_measured(c[name], np.isnan(c[name]) & known, starts, (ufunc, neutral))
    for name in ("nonzero", "nonfinite"):
        absent = c[name] < 0
        total = np.add.reduceat(np.where(absent, 0, c[name]), starts)
        merged[name] = np.where(np.logical_and.reduceat(absent, starts), -1, total)
    return merged


# The value that leaves a merged row as it is stands in for what was not measured.
_FLOATS = (
    ("sum", np.add, 0.0),
    ("sumsq", np.add, 0.0),
    ("min", np.minimum, np.inf),
    ("max", np.maximum, -np.inf),
)


def _reduce_measured(values: Floats, absent: Bools, starts: Ints, how: tuple[np.ufunc, float]) -> Floats:
    ufunc, neutral = how
    merged = ufunc.reduceat(np.where(absent, neutral, values), starts)
    return np.where(np.logical_and.reduceat(absent, starts), np.nan, merged)


def _reduce_bits(bits: Sequence[bytes], starts: Ints) -> list[bytes]:
    ends = np.append(starts[1:], len(bits))
    return [_either(bits[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _either(bits: Sequence[bytes]) -> bytes:
    merged = 0
    width = max(map(len, bits))
    for some in bits:
        merged |= int.from_bytes(some.ljust(width, b"\0"), "big")
    return merged.to_bytes(width, "big")


def _mean(rows: Rows) -> Floats:
    return rows.sum / rows.count


def _rms(rows: Rows) -> Floats:
    return np.asarray(np.sqrt(rows.sumsq / rows.count))


def _std(rows: Rows) -> Floats:
    # Rounding can leave a tiny negative variance where all elements are equal.
    variance = rows.sumsq / rows.count - _mean(rows) ** 2
    return np.asarray(np.sqrt(np.maximum(variance, 0)))


def _zero(rows: Rows) -> Floats:
    return np.where(rows.nonzero < 0, np.nan, 1 - rows.nonzero / rows.count)


def _nonfinite(rows: Rows) -> Floats:
    measured = np.where(rows.nonfinite < 0, np.nan, rows.nonfinite)
    return np.where((rows.nonfinite < 0) & rows.clean, 0.0, measured)


def _absmax(rows: Rows) -> Floats:
    return np.maximum(np.abs(rows.min), np.abs(rows.max))


_DERIVED: dict[str, Callable[[Rows], NDArray[Any]]] = {
    "mean": _mean,
    "rms": _rms,
    "std": _std,
    "absmax": _absmax,
    "min": attrgetter("min"),
    "max": attrgetter("max"),
    "zero": _zero,
    "nonfinite": _nonfinite,
    "count": attrgetter("count"),
}
