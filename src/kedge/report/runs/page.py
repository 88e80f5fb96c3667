"""Several runs as one page: their table, their curves over each other, and any site in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from kedge.report.curves import curves_of
from kedge.report.head import command_of
from kedge.report.page.curves import MOST_POINTS, curves
from kedge.report.page.document import Document
from kedge.report.page.render import assembled, asset, bundled
from kedge.report.runs.shared_sites import (
    described,
    folds_of,
    shared_sites,
    sheets_for,
    single_sites,
)
from kedge.report.runs.smoothing import KEPT
from kedge.report.runs.summary import RunSummary
from kedge.report.runs.table import RunColumn, RunTable
from kedge.report.runs.terminal import told_option
from kedge.rules.rule import Finding
from kedge.short_text import counted, for_json

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


def render_runs_page(table: RunTable, pages: Sequence[str | None] = (), chosen: str = "") -> str:
    """Return several runs as an HTML page.

    Args:
        table: The runs.
        pages: The address of each run's own page; None for a run without one.
        chosen: The filter with which the page opens.
    """
    content = condense_runs(table, pages)
    return assembled(
        asset(FRAME, __package__), _script(), content, more_style=_style(), chosen=chosen
    )


@cache
def _script() -> str:
    return bundled(SCRIPTS, *(asset(name, __package__) for name in OWN))


@cache
def _style() -> str:
    return asset(STYLE, __package__)


def condense_runs(table: RunTable, pages: Sequence[str | None] = ()) -> Document:
    """Return the content of the page."""
    shared = shared_sites([run.recording for run in table.runs])
    points = max(MOST_TOGETHER // len(table.runs), MOST_POINTS // 5)
    runs: list[dict[str, Any]] = []
    tables: dict[str, str] = {}
    columns = [*table.options, *table.figures]
    for place, (run, (sheets, own)) in enumerate(
        zip(table.runs, sheets_for(table.runs, shared), strict=True)
    ):
        page = pages[place] if place < len(pages) else None
        runs.append(_run(run, columns, page, points) | sheets)
        tables |= {f"run{place}-{name}": text for name, text in own.items()}
    equal = {
        name: value
        for name, value in table.differing.equal.items()
        if (name, value) != ("ranks", "1")
    }
    content = {
        "run": {"name": counted(len(runs), "run")},
        "smoothing": KEPT,
        "equal": [told_option(name, value) for name, value in equal.items()]
        if len(runs) > 1
        else [],
        "columns": [
            {"key": column.key, "title": column.title, "kind": column.kind} for column in columns
        ],
        "runs": runs,
        "left_out": [{"recording": one.recording, "reason": one.reason} for one in table.left_out],
        "sites": described(shared),
        "single": single_sites(table.runs, shared),
        "folds": list(folds_of(shared)),
    }
    return Document(content, tables)


def _run(
    run: RunSummary, columns: Sequence[RunColumn], page: str | None, points: int
) -> dict[str, Any]:
    return {
        "name": run.name,
        "page": page,
        "command": command_of(run.recording.manifest),
        "findings": [_finding(one) for one in run.findings],
        "judged": run.complete,
        "ending": run.ending,
        "pace": run.pace,
        "values": [for_json(column.value(run)) for column in columns],
        "curves": list(curves(curves_of(run.recording), points)),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {key: getattr(finding, key) for key in ("code", "severity", "site", "step", "message")}
