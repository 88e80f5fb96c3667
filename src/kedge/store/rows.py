"""The rows of one site: how several merge into one, and the statistics derived from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
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
        """Whether an element is a NaN and not every bad one an infinity, for each row; false where all are finite.

        Where NaN were not counted, the figures tell: a NaN makes every figure of its row NaN, so
        one that is infinite shows that there is none.
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
    count: Ints, total: Floats, sumsq: Floats, low: Floats, high: Floats, nonfinite: Ints
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
        gathered = tuple(values.each()) if name in _JOINED else _number(values)
        self.__dict__[name] = gathered
        return gathered

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
    numbers = {
        name: columns[name][order] for name in Rows.__dataclass_fields__ if name not in _JOINED
    }
    starts = np.flatnonzero(np.diff(numbers["step"], prepend=numbers["step"][0] - 1))
    return _reduced(numbers, {name: columns[name].chosen(order) for name in _JOINED}, starts)


def reduced(columns: Mapping[str, Any], starts: Ints) -> Rows:
    """Return one row for each group of rows, which begin at ``starts``; columns as in `merge`, in order."""
    numbers = {name: columns[name] for name in Rows.__dataclass_fields__ if name not in _JOINED}
    merged = _reduced(numbers, {name: columns[name] for name in _JOINED}, starts)
    held = {name: BinaryColumn.of(getattr(merged, name)) for name in _JOINED}
    return LazyRows({**{name: getattr(merged, name) for name in numbers}, **held})


def _reduced(
    numbers: Mapping[str, NDArray[Any]], bytes_: Mapping[str, BinaryColumn], starts: Ints
) -> Rows:
    merged: dict[str, Any] = {
        name: _number(values) for name, values in _reduce(numbers, starts).items()
    }
    for name in _JOINED:
        merged[name] = tuple(_reduce_bytes(name, bytes_[name].each(), starts))
    return Rows(**merged)


def _number(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.float64 if values.dtype.kind == "f" else np.int64, copy=False)


def _reduce(columns: Mapping[str, NDArray[Any]], starts: Ints) -> dict[str, NDArray[Any]]:
    """Return one row for each group of rows, which begin at ``starts``."""
    c = columns
    known = clean(c["count"], c["sum"], c["sumsq"], c["min"], c["max"], c["nonfinite"])
    merged: dict[str, NDArray[Any]] = {
        "step": c["step"][starts],
        "level": np.maximum.reduceat(c["level"], starts),
    }
    merged["calls"] = np.add.reduceat(c["calls"].astype(np.int64), starts)
    merged["count"] = np.add.reduceat(c["count"], starts)
    with np.errstate(invalid="ignore", over="ignore"):
        for name, ufunc, neutral in _FLOATS:
            merged[name] = _reduce_measured(
                c[name], np.isnan(c[name]) & known, starts, (ufunc, neutral)
            )
    for name in ("nonzero", "nonfinite", "nan", "sampled", "saturated"):
        absent = c[name] < 0
        total = np.add.reduceat(np.where(absent, 0, c[name]).astype(np.int64), starts)
        merged[name] = np.where(np.logical_and.reduceat(absent, starts), -1, total)
    # If a non-finite part did not count such elements, the whole has no count of them.
    for name in ("nonfinite", "nan"):
        lost = np.logical_or.reduceat(~known & (c[name] < 0), starts)
        merged[name] = np.where(lost, -1, merged[name])
    return merged


# Parts that were not measured take the neutral value of the operation.
_FLOATS = (
    ("sum", np.add, 0.0),
    ("sumsq", np.add, 0.0),
    ("min", np.minimum, np.inf),
    ("max", np.maximum, -np.inf),
)


def _reduce_measured(
    values: Floats, absent: Bools, starts: Ints, how: tuple[np.ufunc, float]
) -> Floats:
    ufunc, neutral = how
    merged = ufunc.reduceat(np.where(absent, neutral, values), starts)
    return np.where(np.logical_and.reduceat(absent, starts), np.nan, merged)


def _reduce_bytes(name: str, held: Sequence[bytes], starts: Ints) -> list[bytes]:
    ends = np.append(starts[1:], len(held))
    joined = _JOINED[name]
    groups = (held[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True))
    return [joined(group) if len(group) > 1 else group[0] for group in groups]


def _together(histograms: Sequence[bytes]) -> bytes:
    return encode(np.sum([decode(histogram) for histogram in histograms], axis=0))


def _either(bits: Sequence[bytes]) -> bytes:
    merged = 0
    width = max(map(len, bits))
    for some in bits:
        merged |= int.from_bytes(some.ljust(width, b"\0"), "big")
    return merged.to_bytes(width, "big")


#: How the bytes of rows of one step are merged.
_JOINED: dict[str, Callable[[Sequence[bytes]], bytes]] = {"active": _either, "exponents": _together}


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
    """Return the number of NaN; where they were not counted, it is known only where there is none."""
    return np.where(
        rows.nan >= 0, rows.nan, np.where(rows.clean | _shows_no_nan(rows), 0.0, np.nan)
    )


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
