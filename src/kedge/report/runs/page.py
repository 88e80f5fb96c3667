"""Several runs as one page: their table, their curves over each other, and any site in all of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, repeat
from typing import Any

from kedge.report.curves import KINDS
from kedge.report.page.document import MOST_POINTS, Document, described_site, packed_curves
from kedge.report.page.render import assembled, asset, bundled
from kedge.report.page.sheets import sheets_of, shown_steps
from kedge.report.page.step_bins import MOST, Bins
from kedge.report.runs.summary import KEPT, RunSummary
from kedge.report.runs.table import RunColumn, RunTable
from kedge.short_text import counted, for_json
from kedge.sites.folding import Folding
from kedge.store.recording import Recording, SiteInfo

#: The scripts of a report that are used, each after those it imports from.
SCRIPTS = (
    "elements.js",
    "numbers.js",
    "filters.js",
    "recording.js",
    "state.js",
    "crosses.js",
    "charts.js",
    "quantities.js",
    "filter_field.js",
    "theme.js",
    "keys.js",
)
OWN = (
    "run_choices.js",
    "run_table.js",
    "run_charts.js",
    "run_curves.js",
    "run_sites.js",
    "runs.js",
)
FRAME, STYLE = "runs.html", "runs.css"
#: The most points of all curves of one kind together.
MOST_TOGETHER = 12_000
#: The statistics that can be compared.
COMPARED = ("rms", "std", "min", "max", "q05", "zero", "saturated", "nonfinite")
#: The most numbers of all runs on a page: some fifteen megabytes of it.
MOST_NUMBERS = 5_000_000
#: The fewest columns of steps.
FEWEST = 40


def render_runs_page(
    table: RunTable,
    pages: Sequence[str | None] = (),
    chosen: str = "",
) -> str:
    """Return several runs as an HTML page.

    Args:
        table: The runs.
        pages: The address of each run's own page; None for a run without one, and for the rest.
        chosen: The filter with which the page opens.
    """
    content = condense_runs(table, pages)
    script = bundled(SCRIPTS, *(asset(name, __package__) for name in OWN))
    style = asset(STYLE, __package__)
    body = asset(FRAME, __package__)
    return assembled(body, script, content, more_style=style, chosen=chosen)


def condense_runs(table: RunTable, pages: Sequence[str | None] = ()) -> Document:
    """Return the content of the page."""
    shared = shared_sites([run.shown_run.recording for run in table.runs])
    points = max(MOST_TOGETHER // len(table.runs), MOST_POINTS // 5)
    runs: list[dict[str, Any]] = []
    tables: dict[str, str] = {}
    columns = [*table.options, *table.figures]
    each_page = chain(pages, repeat(None))
    each_sheets = sheets_for(table.runs, shared)
    for run, page, (sheets, own) in zip(table.runs, each_page, each_sheets, strict=False):
        for name, text in own.items():
            tables[f"run{len(runs)}-{name}"] = text
        runs.append(_run(run, columns, page, points) | sheets)

    in_one_run = -sum(len(one.ids) for one in shared)
    for run in table.runs:
        in_one_run += sum(site.kind not in KINDS for site in run.shown_run.recording.sites)
    described_columns = []
    for column in columns:
        entry = {"key": column.key, "title": column.title, "kind": column.kind}
        described_columns.append(entry)
    content = {
        "run": {"name": counted(len(runs), "run")},
        "smoothing": KEPT,
        "equal": table.common,
        "columns": described_columns,
        "runs": runs,
        "left_out": [asdict(one) for one in table.left_out],
        "sites": [_site(one) for one in shared],
        "single": in_one_run,
        "folds": list(folds_of(shared)),
    }
    return Document(content, tables)


def _run(
    run: RunSummary, columns: Sequence[RunColumn], page: str | None, points: int
) -> dict[str, Any]:
    keys = ("code", "severity", "site", "step", "message")
    findings = []
    for finding in run.shown_run.findings:
        entry = asdict(finding)
        findings.append({key: entry[key] for key in keys})
    return {
        "name": run.name,
        "page": page,
        "command": run.shown_run.command,
        "findings": findings,
        "judged": run.shown_run.judgement.complete,
        "over": run.shown_run.is_over,
        "ending": run.ending,
        "pace": run.pace,
        "values": [for_json(column.value(run)) for column in columns],
        "curves": packed_curves(run.shown_run.curves, points),
    }


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
    """Return the sites that at least two recordings have, or all of a single one.

    They are in the order of the data.
    """
    found: dict[str, tuple[SiteInfo, dict[int, int]]] = {}
    for place, recording in enumerate(recordings):
        for site in recording.sites:
            if site.kind not in KINDS:
                found.setdefault(site.site, (site, {}))[1][place] = site.id
    least = min(len(recordings), 2)
    return [SharedSite(site, ids) for site, ids in found.values() if len(ids) >= least]


def _site(shared: SharedSite) -> dict[str, Any]:
    """Return a site for the page, with the places of the runs that have it."""
    known = described_site(shared.site) | {"from": []}
    del known["root"], known["block"]
    return known | {"runs": list(shared.ids)}


def folds_of(shared: Sequence[SharedSite]) -> Iterator[dict[str, Any]]:
    """Yield the lines of the page's list of sites: a name, and the places of its sites.

    Alike blocks share a line.
    """
    places: dict[str, int] = {}
    by_kind: dict[str, list[SharedSite]] = {}
    for place, one in enumerate(shared):
        places[one.site.site] = place
        by_kind.setdefault(one.site.kind, []).append(one)

    def likeness(one: SharedSite) -> Hashable:
        return one.site.type, tuple(one.ids)

    folding = Folding[SharedSite](lambda one: one.site.site, likeness)
    for of_kind in by_kind.values():
        for fold in folding.shown(of_kind):
            members = [places[one.site.site] for one in fold.members]
            yield {"name": fold.name, "members": members}


def sheets_for(
    runs: Sequence[RunSummary], shared: Sequence[SharedSite]
) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Yield the sheets of each run, whose rows are the shared sites, and their tables by name."""
    rows = sum(len(one.ids) for one in shared) * len(COMPARED)
    most = min(max(MOST_NUMBERS // max(rows, 1), FEWEST), MOST)
    for place, run in enumerate(runs):
        recording = run.shown_run.recording
        wanted = [finding.step for finding in run.shown_run.findings if finding.step >= 0]
        bins = Bins.of(shown_steps(recording), wanted, recording.steps, most)
        numbers = [one.ids.get(place) for one in shared]
        sheets = sheets_of(recording, bins).of_rows(numbers, COMPARED)
        entries, tables = sheets.packed(brief=rows * len(bins) > MOST_NUMBERS // 2)
        columns = {"count": len(bins), "single": bins.single}
        yield {"columns": columns, "sheets": entries}, tables | bins.packed()
