"""The rows of a recording as one wide table for other programs: site after site, by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kedge.store.recording import Recording
from kedge.store.rows import Bools, Rows, Statistic
from kedge.store.sites import SiteInfo

Values = NDArray[Any]
Type = Literal["text", "int8", "int32", "int64", "float64"]


@dataclass(frozen=True)
class WideColumn:
    """One column of the wide table.

    Attributes:
        type: The type of its values.
        meaning: Their meaning, in a few words.
        of: Returns the values for the rows of a site, and which of them are known; a text is the
            same for all rows.
    """

    type: Type
    meaning: str
    of: Callable[[SiteInfo, Rows], tuple[Values | str, Bools | None]]


def rows_by_site(recording: Recording) -> Iterator[tuple[SiteInfo, Rows]]:
    """Yield every site that has rows, and its rows; those of one step of several ranks are one."""
    for site in recording.sites:
        rows = recording.all_rows.of(site.id)
        if len(rows):
            yield site, rows


def _text(value_of: Callable[[SiteInfo], str], meaning: str) -> WideColumn:
    return WideColumn("text", meaning, lambda site, _: (value_of(site), None))


def _integer(name: str, kind: Type, meaning: str) -> WideColumn:
    def of(_: SiteInfo, rows: Rows) -> tuple[Values, Bools]:
        values: Values = getattr(rows, name)
        return values.astype(kind), values >= 0

    return WideColumn(kind, meaning, of)


def _float(value_of: Callable[[Rows], Values], meaning: str) -> WideColumn:
    def of(_: SiteInfo, rows: Rows) -> tuple[Values, Bools]:
        values = value_of(rows)
        # A NaN among finite elements was not measured; elsewhere it is the statistic itself.
        return values, ~(np.isnan(values) & rows.clean)

    return WideColumn("float64", meaning, of)


def _statistic(name: Statistic, meaning: str) -> WideColumn:
    return _float(lambda rows: rows.statistic(name), meaning)


def _share(name: Statistic, meaning: str) -> WideColumn:
    """Return the column of a statistic that is a number wherever it was measured."""

    def of(_: SiteInfo, rows: Rows) -> tuple[Values, Bools]:
        values = rows.statistic(name)
        return values, ~np.isnan(values)

    return WideColumn("float64", meaning, of)


def _number(name: Statistic, meaning: str) -> WideColumn:
    """Return the column of a number of elements."""

    def of(_: SiteInfo, rows: Rows) -> tuple[Values, Bools]:
        values = rows.statistic(name)
        return np.nan_to_num(values).astype(np.int64), ~np.isnan(values)

    return WideColumn("int64", meaning, of)


#: Every column, in this order.
WIDE: dict[str, WideColumn] = {
    "step": _integer("step", "int64", "the optimizer's step"),
    "site": _text(lambda site: site.site, "the site's text"),
    "path": _text(lambda site: site.path, "the module's path"),
    "kind": _text(lambda site: site.kind, "the kind of site: out, out.grad, param, ..."),
    "type": _text(lambda site: site.type, "the class of the module"),
    "dtype": _text(lambda site: site.dtype, "the type of the elements"),
    "level": _integer("level", "int8", "2: all statistics; 1: a guarded or skipped step"),
    "calls": _integer("calls", "int32", "how often the site fired"),
    "count": _integer("count", "int64", "elements seen"),
    "mean": _statistic("mean", "their mean"),
    "rms": _statistic("rms", "their root mean square"),
    "std": _statistic("std", "their standard deviation"),
    "min": _statistic("min", "the smallest"),
    "max": _statistic("max", "the largest"),
    "absmax": _statistic("absmax", "the largest magnitude"),
    "zero": _share("zero", "the share that is exactly zero"),
    "nonfinite": _number("nonfinite", "how many are NaN or infinite"),
    "nan": _number("nan", "how many are NaN"),
    "inf": _number("inf", "how many are infinite"),
    "sampled": _integer("sampled", "int32", "elements drawn for the columns below"),
    "saturated": _share("saturated", "the share of them where the activation is flat"),
    "q05": _share("q05", "the 5 % quantile of their magnitudes"),
    "q50": _share("q50", "their median magnitude"),
    "q95": _share("q95", "the 95 % quantile of their magnitudes"),
    "sum": _float(lambda rows: rows.sum, "the sum, for merging"),
    "sumsq": _float(lambda rows: rows.sumsq, "the sum of squares, for merging"),
    "nonzero": _integer("nonzero", "int64", "how many are not exactly zero, for merging"),
}
