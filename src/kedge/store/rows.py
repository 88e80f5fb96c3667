"""The rows of one site: how several merge into one, and the statistics derived from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kedge.store.binary_column import BinaryColumn
from kedge.store.exponents import decode, decode_all, encode, quantiles

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Statistic = Literal[
    "mean", "rms", "std", "absmax", "min", "max", "zero", "nonfinite", "nan", "inf", "count",
    "saturated", "q05", "q50", "q95",
]  # fmt: skip

STATISTICS: tuple[Statistic, ...] = get_args(Statistic)

#: The statistics that are quantiles.
QUANTILES = {"q05": 0.05, "q50": 0.5, "q95": 0.95}

FULL = 2
LIGHT = 1


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one site, one per step, in the order of steps.

    ``sum``, ``sumsq``, ``min`` and ``max`` are NaN where they were not measured or an element was
    NaN; ``nonzero``, ``nonfinite``, ``nan``, ``sampled`` and ``saturated`` are -1 where they were
    not measured; ``nonfinite`` counts NaN and infinities, ``nan`` the NaN alone. ``level`` is 2 for
    full statistics and 1 for those of a light step. ``active`` has one packed bit per channel
    (``numpy.packbits``), ``exponents`` a histogram as in Note [Exponents]; either is empty where it
    was not tracked.

    Its fields are the columns of the table, which is why there are so many.
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
    nan: Ints
    sampled: Ints
    saturated: Ints
    active: tuple[bytes, ...]
    exponents: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.step)

    @cached_property
    def clean(self) -> Bools:
        """Whether every element is known to be finite, for each row."""
        # Usually all sums of squares are finite, which is enough; then no other column is read.
        known = (self.nonfinite <= 0) & np.isfinite(self.sumsq)
        if known.all():
            return known
        return clean(self.count, self.sum, self.sumsq, self.min, self.max, self.nonfinite)

    @cached_property
    def has_nan(self) -> Bools:
        """Whether an element is a NaN and not every bad one an infinity, for each row.

        It is false where all are finite. Where NaN were not counted, the figures tell: a NaN makes
        every figure of its row NaN, so one that is infinite shows that there is none.
        """
        figures = np.isnan(np.stack([self.sum, self.sumsq, self.min, self.max])).any(axis=0)
        return np.where(self.nan < 0, figures & ~_shows_no_nan(self), self.nan > 0)

    @cached_property
    def quantiles(self) -> Mapping[str, Floats]:
        """The quantiles of the magnitudes of the drawn elements; all cost little more than one."""
        counts = decode_all(self.held("exponents"))
        return dict(zip(QUANTILES, quantiles(counts, tuple(QUANTILES.values())), strict=True))

    def held(self, name: str) -> BinaryColumn:
        """Return ``active`` or ``exponents`` of all rows."""
        return BinaryColumn.of(getattr(self, name))

    def statistic(self, name: str) -> Floats:
        """Return one statistic of every row, NaN where it was not measured.

        Args:
            name: One of ``STATISTICS``. ``zero`` is the share of elements that are exactly zero,
                ``nonfinite``, ``nan``, ``inf`` and ``count`` are numbers of elements, ``saturated``
                is a share, and ``q05`` to ``q95`` are quantiles of the magnitudes of the drawn
                elements.
        """
        if name not in STATISTICS:
            raise ValueError(
                f"{name!r} is not a statistic of a recording; there are {', '.join(STATISTICS)}"
            )
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            return np.asarray(_DERIVED[name](self), dtype=np.float64)


def clean(
    count: Ints,
    total: Floats,
    sumsq: Floats,
    low: Floats,
    high: Floats,
    nonfinite: Ints,
) -> Bools:
    """Whether the elements of each row are known to be finite.

    A NaN or infinite element makes the sum, the sum of squares and one of the extremes
    non-finite. So one finite value among them shows that a NaN in another means "not measured".
    """
    known = np.isfinite(total) | np.isfinite(sumsq) | (np.isfinite(low) & np.isfinite(high))
    return np.asarray(known & (nonfinite <= 0) | (nonfinite == 0) | (count == 0))


class LazyRows(Rows):
    """Rows whose columns are read when first needed: in a large recording, few are."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.__dict__["_columns"] = columns

    def __getattr__(self, name: str) -> Any:
        if name not in Rows.__dataclass_fields__:
            raise AttributeError(
                f"rows have no {name!r}; they have {', '.join(Rows.__dataclass_fields__)}"
            )
        values = self.__dict__["_columns"][name]
        if name in _JOINED:
            self.__dict__[name] = tuple(values.each())
        else:
            self.__dict__[name] = _number(values)
        return self.__dict__[name]

    def held(self, name: str) -> BinaryColumn:
        """Return ``active`` or ``exponents`` of all rows."""
        held: BinaryColumn = self.__dict__["_columns"][name]
        return held


def merge(columns: Mapping[str, Any]) -> Rows:
    """Return the rows of one site in the order of steps, those of one step merged into one.

    Args:
        columns: The columns of the rows, in any order: arrays of numbers, and a `BinaryColumn` for
            ``active`` and ``exponents``. If the rows are in order already, each column is read when
            first needed.
    """
    step = columns["step"]
    if not np.any(step[1:] <= step[:-1]):
        return LazyRows(columns)
    order = np.argsort(step, kind="stable")
    ordered: dict[str, Any] = {}
    for name in Rows.__dataclass_fields__:
        if name in _JOINED:
            ordered[name] = columns[name].chosen(order)
        else:
            ordered[name] = columns[name][order]
    starts = np.flatnonzero(np.diff(ordered["step"], prepend=ordered["step"][0] - 1))
    return reduced(ordered, starts)


def reduced(columns: Mapping[str, Any], starts: Ints) -> Rows:
    """Return one row for each group of rows.

    Args:
        columns: The columns as in `merge`, in order.
        starts: The places at which the groups begin.
    """
    merged: dict[str, Any] = {}
    for name, values in _reduced_numbers(columns, starts).items():
        merged[name] = _number(values)
    for name in _JOINED:
        merged[name] = BinaryColumn.of(_reduced_bytes(name, columns[name].each(), starts))
    return LazyRows(merged)


def _number(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind == "f":
        return values.astype(np.float64, copy=False)
    return values.astype(np.int64, copy=False)


def _reduced_numbers(
    columns: Mapping[str, Any],
    starts: Ints,
) -> dict[str, NDArray[Any]]:
    known = clean(
        columns["count"],
        columns["sum"],
        columns["sumsq"],
        columns["min"],
        columns["max"],
        columns["nonfinite"],
    )
    merged: dict[str, NDArray[Any]] = {
        "step": columns["step"][starts],
        "level": np.maximum.reduceat(columns["level"], starts),
        "calls": np.add.reduceat(columns["calls"].astype(np.int64), starts),
        "count": np.add.reduceat(columns["count"], starts),
    }
    with np.errstate(invalid="ignore", over="ignore"):
        for name, ufunc, neutral in _FLOATS:
            values = columns[name]
            absent = np.isnan(values) & known
            total = ufunc.reduceat(np.where(absent, neutral, values), starts)
            merged[name] = np.where(np.logical_and.reduceat(absent, starts), np.nan, total)
    for name in ("nonzero", "nonfinite", "nan", "sampled", "saturated"):
        values = columns[name]
        absent = values < 0
        total = np.add.reduceat(np.where(absent, 0, values).astype(np.int64), starts)
        merged[name] = np.where(np.logical_and.reduceat(absent, starts), -1, total)
    # If a non-finite part did not count such elements, the whole has no count of them.
    for name in ("nonfinite", "nan"):
        lost = np.logical_or.reduceat(~known & (columns[name] < 0), starts)
        merged[name] = np.where(lost, -1, merged[name])
    return merged


# Parts that were not measured take the neutral value of the operation.
_FLOATS = (
    ("sum", np.add, 0.0),
    ("sumsq", np.add, 0.0),
    ("min", np.minimum, np.inf),
    ("max", np.maximum, -np.inf),
)


def _reduced_bytes(name: str, held: Sequence[bytes], starts: Ints) -> list[bytes]:
    joined = _JOINED[name]
    merged = []
    for start, end in pairwise([*starts.tolist(), len(held)]):
        if end == start + 1:
            merged.append(held[start])
        else:
            merged.append(joined(held[start:end]))
    return merged


def _together(histograms: Sequence[bytes]) -> bytes:
    return encode(np.sum([decode(histogram) for histogram in histograms], axis=0))


def _either(bits: Sequence[bytes]) -> bytes:
    merged = 0
    width = max(map(len, bits))
    for some in bits:
        merged |= int.from_bytes(some.ljust(width, b"\0"), "big")
    return merged.to_bytes(width, "big")


#: How the bytes of rows of one step are merged.
_JOINED: dict[str, Callable[[Sequence[bytes]], bytes]] = {
    "active": _either,
    "exponents": _together,
}


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
    return np.where((rows.nonfinite < 0) & rows.clean & (rows.count > 0), 0.0, measured)


def _nan(rows: Rows) -> Floats:
    """Return the number of NaN.

    Where they were not counted, it is known only where there is none.
    """
    uncounted = np.where(rows.clean | _shows_no_nan(rows), 0.0, np.nan)
    return np.where(rows.nan >= 0, rows.nan, uncounted)


def _shows_no_nan(rows: Rows) -> Bools:
    figures = np.stack([rows.sum, rows.sumsq, rows.min, rows.max])
    return np.asarray(np.isinf(figures).any(axis=0) | ~np.isnan(rows.min) | ~np.isnan(rows.max))


def _inf(rows: Rows) -> Floats:
    return _nonfinite(rows) - _nan(rows)


def _absmax(rows: Rows) -> Floats:
    return np.maximum(np.abs(rows.min), np.abs(rows.max))


def _saturated(rows: Rows) -> Floats:
    measured = (rows.saturated >= 0) & (rows.sampled > 0)
    return np.where(measured, rows.saturated / rows.sampled, np.nan)


def _quantile(rows: Rows, name: str) -> Floats:
    return rows.quantiles[name]


_DERIVED: dict[str, Callable[[Rows], NDArray[Any]]] = {
    "mean": _mean,
    "rms": _rms,
    "std": _std,
    "absmax": _absmax,
    "min": attrgetter("min"),
    "max": attrgetter("max"),
    "zero": _zero,
    "nonfinite": _nonfinite,
    "nan": _nan,
    "inf": _inf,
    "count": attrgetter("count"),
    "saturated": _saturated,
    "q05": partial(_quantile, name="q05"),
    "q50": partial(_quantile, name="q50"),
    "q95": partial(_quantile, name="q95"),
}
