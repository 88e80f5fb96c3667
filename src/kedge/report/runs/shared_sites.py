"""The sites that several runs have in common, and their statistics for a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kedge.report.curves import KINDS
from kedge.report.page.columns import packed
from kedge.report.page.heatmap_sheets import Sheet, Sheets, sheets_of, shown_steps
from kedge.report.page.step_bins import MOST, Bins
from kedge.report.runs.summary import RunSummary
from kedge.sites.folding import Folding
from kedge.store.recording import Recording, SiteInfo

#: The statistics that can be compared.
COMPARED = ("rms", "std", "min", "max", "q05", "zero", "saturated", "nonfinite")
#: The most numbers of all runs on a page: some fifteen megabytes of it.
MOST_NUMBERS = 5_000_000
#: The fewest columns of steps.
FEWEST = 40

Described = dict[str, Any]


@dataclass(frozen=True, eq=False)
class SharedSite:
    """A site that several runs have.

    Attributes:
        site: Its description in the first of them.
        ids: Its number in each of them, by the place of the run.
    """

    site: SiteInfo
    ids: Mapping[int, int]


def shared_sites(recordings: Sequence[Recording]) -> list[SharedSite]:
    """Return the sites that at least two recordings have, or all of a single one, in the order of the data."""
    found: dict[str, tuple[SiteInfo, dict[int, int]]] = {}
    for place, recording in enumerate(recordings):
        for site in recording.sites:
            if site.kind not in KINDS:
                found.setdefault(site.site, (site, {}))[1][place] = site.id
    least = min(len(recordings), 2)
    return [SharedSite(site, ids) for site, ids in found.values() if len(ids) >= least]


def single_sites(runs: Sequence[RunSummary], shared: Sequence[SharedSite]) -> int:
    """Return the number of sites that are not shared."""
    known = sum(site.kind not in KINDS for run in runs for site in run.recording.sites)
    return known - sum(len(one.ids) for one in shared)


def described(shared: Sequence[SharedSite]) -> list[Described]:
    """Return the sites for the page, each with the places of the runs that have it."""
    return [
        {
            "site": one.site.site,
            "path": one.site.path,
            "kind": one.site.kind,
            "type": one.site.type,
            "shape": list(one.site.shape),
            "dtype": one.site.dtype,
            "owner": one.site.owner,
            "from": [],
            "runs": list(one.ids),
        }
        for one in shared
    ]


def folds_of(shared: Sequence[SharedSite]) -> Iterator[Described]:
    """Yield the lines of the page's list of sites: a name, and the places of its sites; alike blocks share a line."""
    places = {one.site.site: place for place, one in enumerate(shared)}
    folding = Folding[SharedSite](
        lambda one: one.site.site, lambda one: (one.site.type, tuple(one.ids))
    )
    for kind in dict.fromkeys(one.site.kind for one in shared):
        for fold in folding.shown([one for one in shared if one.site.kind == kind]):
            yield {"name": fold.name, "members": [places[one.site.site] for one in fold.members]}


def sheets_for(
    runs: Sequence[RunSummary], shared: Sequence[SharedSite]
) -> Iterator[tuple[Described, dict[str, str]]]:
    """Yield the sheets of each run, whose rows are the shared sites, and their tables by name."""
    rows = sum(len(one.ids) for one in shared) * len(COMPARED)
    most = min(max(MOST_NUMBERS // max(rows, 1), FEWEST), MOST)
    for place, run in enumerate(runs):
        recording = run.recording
        wanted = [finding.step for finding in run.findings if finding.step >= 0]
        bins = Bins.of(shown_steps(recording), wanted, recording.steps, most)
        sheets = _chosen(sheets_of(recording, bins), [one.ids.get(place) for one in shared])
        entries = sheets.entries(brief=rows * len(bins) > MOST_NUMBERS // 2)
        tables = {name: entry.pop("data") for name, entry in entries.items()}
        tables["first"] = packed(bins.first.astype(np.float64), "f8")
        tables["last"] = packed(bins.last.astype(np.float64), "f8")
        yield {"columns": {"count": len(bins), "single": bins.single}, "sheets": entries}, tables


def _chosen(sheets: Sheets, ids: Sequence[int | None]) -> Sheets:
    """Return the sheets of some sites: their rows are the places in the list of their numbers."""
    places = {number: place for place, number in enumerate(ids) if number is not None}
    states = np.zeros((len(ids), sheets.states.shape[1]), dtype=np.uint8)
    states[list(places.values())] = sheets.states[list(places)]
    return Sheets(
        states,
        {
            name: _rows_of(sheets.by_name[name], places)
            for name in COMPARED
            if name in sheets.by_name
        },
    )


def _rows_of(sheet: Sheet, places: Mapping[int, int]) -> Sheet:
    kept = [row for row, number in enumerate(sheet.rows) if number in places]
    return Sheet([places[sheet.rows[row]] for row in kept], sheet.values[kept])
