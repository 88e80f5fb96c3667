"""The statistics of all sites as sheets: a row for each site, a column for each bin of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    """One statistic: the ids of the sites that have it, and their values."""

    rows: list[int]
    values: Floats

    def entry(self, name: str, *, brief: bool) -> dict[str, Any]:
        """Return the sheet for the page; ``data`` is its text."""
        form = form_of(self.values, share=name in SHARES, brief=brief)
        return {"rows": self.rows, "form": form, "data": packed(self.values, form)}


@dataclass(frozen=True, eq=False)
class Sheets:
    """All sheets of a recording, and the state of every cell."""

    states: NDArray[np.uint8]
    by_name: Mapping[str, Sheet]

    @property
    def size(self) -> int:
        """The number of values in all sheets."""
        return sum(sheet.values.size for sheet in self.by_name.values())

    def entries(self, *, brief: bool = False) -> dict[str, dict[str, Any]]:
        """Return all sheets for the page, with two or three digits if they are large or ``brief`` is set."""
        brief = brief or self.size > MANY
        made = {name: sheet.entry(name, brief=brief) for name, sheet in self.by_name.items()}
        made["state"] = {"rows": None, "form": "n1", "data": packed(self.states, "n1")}
        return made


def shown_steps(recording: Recording) -> Ints:
    """Return the steps of the page's columns: measured steps, and light ones with values of further sites."""
    apart = set(_apart(recording))
    rows = (recording.rows(site) for site in recording.sites if site.id not in apart)
    light = [own.step[own.level != FULL] for own in rows]
    return np.unique(np.concatenate([recording.steps, *light]))


def _apart(recording: Recording) -> list[int]:
    """Return the sites that are recorded in every step: curves, and outputs that are a single number."""
    return [site.id for site in recording.sites if site.kind in KINDS or is_number(recording, site)]


def sheets_of(recording: Recording, bins: Bins) -> Sheets:
    """Return the sheets of all sites."""
    states = np.zeros((len(recording.sites), len(bins)), dtype=np.uint8)
    held: dict[str, tuple[list[int], list[Floats]]] = {}
    for site in recording.sites:
        rows = recording.rows(site)
        if not len(rows) or site.kind in KINDS:
            continue
        groups = Grouping.of(bins, rows.step)
        states[site.id, groups.columns] = _states(rows, groups)
        for name, values in _folded(recording, site, rows, groups, bins):
            if (
                np.nan_to_num(values) if name == "nan" else ~np.isnan(values)
            ).any():  # of NaN there usually is none
                ids, kept = held.setdefault(name, ([], []))
                ids.append(site.id)
                kept.append(values)
    return Sheets(states, {name: Sheet(ids, np.array(kept)) for name, (ids, kept) in held.items()})


def _states(rows: Rows, groups: Grouping) -> NDArray[np.uint8]:
    each = np.where(rows.count == 0, ABSENT, np.where(rows.clean, FINITE, BROKEN)).astype(np.uint8)
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
            yield name, _placed(drawn, quantile(merged, q))


def _placed(groups: Grouping, values: Floats) -> Floats:
    placed = np.full(groups.width, np.nan)
    placed[groups.columns] = values
    return placed


def statistic(site: SiteInfo, rows: Rows, name: str) -> Floats:
    """Return a statistic of a site's rows as the page shows it.

    In light steps a parameter's gradient is recorded only if it is non-finite, which is not typical
    of the others.
    """
    values = rows.statistic(name)
    if site.kind == "param.grad" and name not in ("nonfinite", "nan"):
        return np.where(rows.level == FULL, values, np.nan)
    return values
