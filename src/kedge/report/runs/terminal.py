"""Several runs in a terminal: the table, and the loss of each on one scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from kedge.report.curves import Curve
from kedge.report.findings import MARKS, STYLES
from kedge.report.fitted_text import cut, joined, print_paragraph
from kedge.report.runs.summary import KEPT, RunSummary
from kedge.report.runs.table import RunColumn, RunTable
from kedge.report.sparkline import BAD, coloured, linear, sparkline
from kedge.report.table import Column, widest
from kedge.short_text import compact, counted, seconds, sized

MOST_NAME, MOST_OPTION = 26, 18
LEAST_COURSE, MOST_COURSE = 20, 40
#: The titles of the losses over the steps, the first that fits.
COURSE = ("loss over the steps", "loss course", "loss", "")
#: The columns of figures, the most important first: two before the options that differ, the others
#: if they fit.
SHOWN = (
    "loss",
    "best",
    "steps",
    "norm",
    "seconds_per_step",
    "saved",
    "best_step",
    "seconds",
    "started",
)

LEGEND = (
    "loss, best loss, grad norm: an exponential moving average that keeps "
    f"{KEPT:.0%} at each value. findings: the worst, and how many kinds more. "
    "Losses are drawn on one scale, over the same steps; ✗ not finite. "
    "kedge report RUN describes one run, kedge diff A B finds where two part."
)


def render_runs(table: RunTable, console: Console) -> None:
    """Print several runs: what they have in common, and a line for each."""
    for line in heading(table):
        print_paragraph(line, console)
    console.print()

    shown, left = _fitting(table, console.width)
    room = min(console.width - sum(column.width + 1 for column in shown), MOST_COURSE)
    losses = [next(iter(run.shown_run.losses), None) for run in table.runs]
    courses = drawn_together(losses, room)
    title = ""
    if any(courses):
        title = next(title for title in COURSE if len(title) <= room)
    head = joined([*(column.head for column in shown), title])
    head.stylize("bold")
    console.print(head)
    for run, course in zip(table.runs, courses, strict=True):
        console.print(joined([*(column.fitted(run) for column in shown), course]))
    console.print()

    for one in table.left_out:
        print_paragraph(Text(f"left out: {one.recording}: {one.reason}", "yellow"), console)
    if left:
        more = f"{counted(len(left), 'column')} more with --html or --json: {', '.join(left)}"
        print_paragraph(Text(more), console)
    print_paragraph(Text(LEGEND, "dim"), console)


def heading(table: RunTable) -> Iterator[Text]:
    """Yield the number of runs, and what is equal in all of them."""
    yield Text(counted(len(table.runs), "run"), "bold")
    if table.common:
        yield Text(f"the same in all: {' · '.join(table.common)}")


def _fitting(table: RunTable, width: int) -> tuple[list[Column[RunSummary]], list[str]]:
    """Return the columns that fit beside a course, and the titles of those that do not."""
    runs = table.runs
    name = widest("run", runs, lambda run: Text(cut(run.name, MOST_NAME), "bold"))
    findings = widest("findings", runs, told_findings)
    options = [_column(column, runs) for column in table.options]
    known = {column.key: _column(column, runs) for column in table.figures}
    figures = [known[key] for key in SHOWN if key in known]

    typed = [column for column in options if column.title.startswith("-")]
    others = [column for column in options if not column.title.startswith("-")]
    room = width - LEAST_COURSE - name.width - findings.width - 2
    fitting = {id(name), id(findings)}
    for column in [*figures[:2], *typed, *others, *figures[2:]]:
        if column.width + 1 <= room:
            fitting.add(id(column))
            room -= column.width + 1

    ordered = [name, findings, *options, *figures]
    shown = [column for column in ordered if id(column) in fitting]
    return shown, [column.title for column in ordered if id(column) not in fitting]


def _column(column: RunColumn, runs: Sequence[RunSummary]) -> Column[RunSummary]:
    title = cut(column.title, MOST_OPTION)
    return widest(title, runs, partial(_cell, column), right=column.kind != "option")


def _cell(column: RunColumn, run: RunSummary) -> Text:
    value: Any = column.value(run)
    if value is None:
        return Text("-", "dim")
    match column.kind:
        case "number":
            return Text(compact(value), "" if np.isfinite(value) else BAD)
        case "option":
            return Text(cut(value, MOST_OPTION))
        case "moment":
            return Text(f"{datetime.fromisoformat(value):%m-%d %H:%M}")
        case "seconds":
            return Text(seconds(value))
        case "bytes":
            return Text(sized(value))
        case "count":
            return Text(f"{value:,}")


def told_findings(run: RunSummary) -> Text:
    """Return the verdict on a run in a few words: its first finding, more kinds, and its end."""
    findings = run.shown_run.findings
    if findings:
        worst = findings[0]
        said = Text(f"{MARKS[worst.severity]} {worst.code}", STYLES[worst.severity])
        more = len({finding.code for finding in findings}) - 1
        if more:
            said.append(f" +{more}")
    elif run.shown_run.judgement.complete:
        said = Text("✓", "green")
    elif run.shown_run.is_over:
        said = Text("none", "dim")
    else:
        said = Text("none so far", "dim")
    if run.ending:
        said.append(f" {run.ending}", "yellow")
    return said


def drawn_together(curves: Sequence[Curve | None], width: int) -> list[Text]:
    """Return curves as lines of blocks on one scale, and over the same steps.

    The scale is logarithmic if no value is negative.
    """
    known = [curve for curve in curves if curve is not None]
    if not known:
        return [Text("") for _ in curves]
    steps = max(int(curve.steps[-1]) for curve in known) + 1
    finite = np.concatenate([curve.finite[np.isfinite(curve.finite)] for curve in known])
    low, high = 0.0, 1.0
    if len(finite):
        low, high = finite.min(), finite.max()
    positive = finite[finite > 0]
    ends = None
    if low < 0:
        ends = (1.0, 10.0)
    elif len(positive):
        ends = (positive.min(), positive.max())

    texts = []
    for curve in curves:
        if curve is None:
            texts.append(Text(""))
            continue
        values = np.where(curve.bad, np.nan, curve.values)
        if low < 0:
            values = linear(values, low, high)
        places = curve.steps * width // max(steps, width)
        cells = np.full(width, np.nan)
        np.fmax.at(cells, places, values)
        broken = np.zeros(width, dtype=bool)
        broken[places[curve.bad | ~np.isfinite(curve.values)]] = True
        texts.append(coloured(sparkline(cells, broken, width, ends), "cyan"))
    return texts
