"""The statistics of all sites as sheets: a row for each site, a column for each bin of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.report.curves import KINDS, is_number
from kedge.report.page.columns import form_of, packed
from kedge.report.page.step_bins import Bins, Grouping
from kedge.store.exponents import quantile
from kedge.store.recording import Recording, Rows, SiteInfo
from kedge.store.rows import FULL, QUANTILES, Floats, Ints

#: The statistics with sheets, and the fold of the steps that share a column.
FOLDS = {
    "rms": "most",
    "mean": "furthest",
    "std": "most",
    "min": "least",
    "max": "most",
    "zero": "most",
    "nonfinite": "most",
    "nan": "most",
    "saturated": "most",
}
#: Further folds of the scale.
SCALES = {"rms.least": "least", "rms.last": "last"}
SHARES = {"zero", "saturated"}

#: States of a cell.
ABSENT, FINITE, BROKEN = 0, 1, 2

#: Above this many numbers, forms of two or three digits are used.
MANY = 2_000_000


@dataclass(frozen=True, eq=False)
class Sheet:
    """One statistic: the numbers of the rows that have it, and their values."""

    rows: list[int]
    values: Floats

    @classmethod
    def of(cls, values: Floats) -> Sheet:
        """Return the sheet of a matrix, without the rows that have no value."""
        rows = np.flatnonzero((~np.isnan(values)).any(axis=1))
        return cls(rows.tolist(), values[rows])


@dataclass(frozen=True, eq=False)
class Sheets:
    """All sheets of a recording, and the state of every cell.

    Attributes:
        bins: The columns.
        states: The state of each cell.
        by_name: The sheets.
    """

    bins: Bins
    states: NDArray[np.uint8]
    by_name: Mapping[str, Sheet]

    @property
    def size(self) -> int:
        """The number of values in all sheets."""
        return sum(sheet.values.size for sheet in self.by_name.values())

    def packed(self, *, brief: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the sheets for the page, and their tables by name.

        Args:
            brief: Whether two or three digits are enough; they always are if the sheets are large.
        """
        entries: dict[str, Any] = {}
        tables: dict[str, str] = {}
        brief = brief or self.size > MANY
        for name, sheet in self.by_name.items():
            form = form_of(sheet.values, share=name in SHARES, brief=brief)
            entries[name] = {"rows": sheet.rows, "form": form}
            tables[name] = packed(sheet.values, form)
        entries["state"] = {"rows": None, "form": "n1"}
        tables["state"] = packed(self.states, "n1")
        return entries, tables

    def of_rows(self, numbers: Sequence[int | None], names: Sequence[str]) -> Sheets:
        """Return some sheets of some rows, whose new numbers are their places.

        A row without a number is empty.
        """
        places = {number: place for place, number in enumerate(numbers) if number is not None}
        states = np.zeros((len(numbers), self.states.shape[1]), dtype=np.uint8)
        states[list(places.values())] = self.states[list(places)]
        by_name = {}
        for name in names:
            if name in self.by_name:
                sheet = self.by_name[name]
                kept = [row for row, number in enumerate(sheet.rows) if number in places]
                rows = [places[sheet.rows[row]] for row in kept]
                by_name[name] = Sheet(rows, sheet.values[kept])
        return Sheets(self.bins, states, by_name)


def shown_steps(recording: Recording) -> Ints:
    """Return the steps of the page's columns: measured ones, and light ones with further values."""
    found = [recording.steps]
    for site in recording.sites:
        # Curves, and outputs that are a single number, are recorded in every step.
        if site.kind not in KINDS and not is_number(recording, site):
            rows = recording.rows(site)
            found.append(rows.step[rows.level != FULL])
    return np.unique(np.concatenate(found))


def sheets_of(recording: Recording, bins: Bins) -> Sheets:
    """Return the sheets of all sites."""
    states = np.zeros((len(recording.sites), len(bins)), dtype=np.uint8)
    found: dict[str, tuple[list[int], list[Floats]]] = {}
    for site in recording.sites:
        rows = recording.rows(site)
        if not len(rows) or site.kind in KINDS:
            continue
        groups = Grouping.of(bins, rows.step)
        states[site.id, groups.columns] = _states(rows, groups)
        for name, values in _folded(recording, site, rows, groups, bins):
            present = ~np.isnan(values)
            if name == "nan":  # there usually is none, so a sheet of zeros is left out
                present &= values != 0
            if present.any():
                ids, kept = found.setdefault(name, ([], []))
                ids.append(site.id)
                kept.append(values)
    sheets = {name: Sheet(ids, np.array(kept)) for name, (ids, kept) in found.items()}
    return Sheets(bins, states, sheets)


def _states(rows: Rows, groups: Grouping) -> NDArray[np.uint8]:
    each = np.full(len(rows), BROKEN, dtype=np.uint8)
    each[rows.clean] = FINITE
    each[rows.count == 0] = ABSENT
    return np.asarray(np.maximum.reduceat(each, groups.starts))


def _folded(
    recording: Recording, site: SiteInfo, rows: Rows, groups: Grouping, bins: Bins
) -> Iterator[tuple[str, Floats]]:
    for name, how in FOLDS.items():
        yield name, groups.fold(statistic(site, rows, name), how)
    if not bins.single:
        scale = statistic(site, rows, "rms")
        for name, how in SCALES.items():
            yield name, groups.fold(scale, how)
    steps, counts = recording.exponents(site)
    if len(steps):
        drawn = Grouping.of(bins, steps)
        # Histograms add up, so a column's quantile is that of all its steps together.
        merged = np.add.reduceat(counts, drawn.starts, axis=0)
        for name, q in QUANTILES.items():
            values = np.full(drawn.width, np.nan)
            values[drawn.columns] = quantile(merged, q)
            yield name, values


def statistic(site: SiteInfo, rows: Rows, name: str) -> Floats:
    """Return a statistic of a site's rows as the page shows it.

    In light steps a parameter's gradient is recorded only if it is non-finite, which is not typical
    of the others.
    """
    values = rows.statistic(name)
    if site.kind == "param.grad" and name not in ("nonfinite", "nan"):
        return np.where(rows.level == FULL, values, np.nan)
    return values
