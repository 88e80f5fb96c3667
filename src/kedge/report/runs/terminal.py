"""Several runs in a terminal: the table, and the loss of each on one scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from kedge.report.curves import Curve
from kedge.report.findings import MARKS, STYLES
from kedge.report.fitted_text import cut, fit, joined, print_paragraph
from kedge.report.module_table import BAD
from kedge.report.runs.smoothing import KEPT
from kedge.report.runs.summary import RunSummary
from kedge.report.runs.table import RunColumn, RunTable
from kedge.report.sparkline import NOT_FINITE, ScaleSeries, sparkline
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
    f"loss, best loss, grad norm: an exponential moving average that keeps {KEPT:.0%} at each value. "
    "findings: the worst, and how many kinds more. Losses are drawn on one scale, over the same steps; ✗ not finite. "
    "kedge report RUN describes one run, kedge diff A B finds where two part."
)


@dataclass(frozen=True)
class TextColumn:
    """A column as text: its title, a cell for each run, and whether they are aligned to the right."""

    title: str
    cells: Sequence[Text]
    right: bool = False

    @property
    def width(self) -> int:
        """The width of its widest cell."""
        return max([len(self.title), *(cell.cell_len for cell in self.cells)])

    def at(self, place: int) -> Text:
        """Return the cell of one run in the width of the column."""
        return fit(self.cells[place], self.width, right=self.right)


def render_runs(table: RunTable, console: Console) -> None:
    """Print several runs: what they have in common, and a line for each."""
    for line in heading(table):
        print_paragraph(line, console)
    console.print()
    shown, left = _fitting(table, console.width)
    room = min(console.width - sum(column.width + 1 for column in shown), MOST_COURSE)
    courses = drawn_together([_loss(run) for run in table.runs], room)
    titles = [fit(column.title, column.width, right=column.right) for column in shown]
    head = joined([*titles, _course_title(room) if any(courses) else ""])
    head.stylize("bold")
    console.print(head)
    for place, course in enumerate(courses):
        console.print(joined([*(column.at(place) for column in shown), course]))
    console.print()
    for one in table.left_out:
        print_paragraph(Text(f"left out: {one.recording}: {one.reason}", "yellow"), console)
    if left:
        print_paragraph(
            Text(f"{counted(len(left), 'column')} more with --html or --json: {', '.join(left)}"),
            console,
        )
    print_paragraph(Text(LEGEND, "dim"), console)


def _course_title(width: int) -> str:
    return next(title for title in COURSE if len(title) <= width)


def heading(table: RunTable) -> Iterator[Text]:
    """Yield the number of runs, and what is equal in all of them."""
    yield Text(counted(len(table.runs), "run"), "bold")
    equal = {
        name: value
        for name, value in table.differing.equal.items()
        if (name, value) != ("ranks", "1")
    }
    if equal and len(table.runs) > 1:
        yield Text(
            "the same in all: " + " · ".join(told_option(*option) for option in equal.items())
        )


def told_option(name: str, value: str) -> str:
    """Return an option and its value as text; a program is its value alone."""
    if name in ("program", "model", "device"):
        return value
    return name if value == "yes" and name.startswith("-") else f"{name} {value}"


def _fitting(table: RunTable, width: int) -> tuple[list[TextColumn], list[str]]:
    """Return the columns that fit beside a course, and the titles of those that do not."""
    runs = table.runs
    own = [
        TextColumn("run", [Text(cut(run.name, MOST_NAME), "bold") for run in runs]),
        TextColumn("findings", [told_findings(run) for run in runs]),
    ]
    options = [_column(column, runs) for column in table.options]
    known = {column.key: _column(column, runs) for column in table.figures}
    figures = [known[key] for key in SHOWN if key in known]
    typed = [column for column in options if column.title.startswith("-")]
    room = width - LEAST_COURSE
    fitting: list[TextColumn] = []
    for column in [
        *own,
        *figures[:2],
        *typed,
        *(one for one in options if one not in typed),
        *figures[2:],
    ]:
        if column in own or column.width + 1 <= room:
            fitting.append(column)
            room -= column.width + 1
    ordered = [*own, *options, *figures]
    return [one for one in ordered if one in fitting], [
        one.title for one in ordered if one not in fitting
    ]


def _column(column: RunColumn, runs: Sequence[RunSummary]) -> TextColumn:
    title = cut(column.title, MOST_OPTION)
    return TextColumn(
        title, [told(column, column.value(run)) for run in runs], column.kind != "option"
    )


def told(column: RunColumn, value: Any) -> Text:
    """Return a value as the text of a cell."""
    if value is None:
        return Text("-", "dim")
    if column.kind == "number":
        return Text(compact(value), "" if np.isfinite(value) else BAD)
    if column.kind == "option":
        return Text(cut(value, MOST_OPTION))
    if column.kind == "moment":
        return Text(f"{datetime.fromisoformat(value):%m-%d %H:%M}")
    return Text({"seconds": seconds, "bytes": sized, "count": "{:,}".format}[column.kind](value))


def told_findings(run: RunSummary) -> Text:
    """Return the verdict on a run in a few words: its first finding, the number of others, and how it ended."""
    if run.findings:
        worst = run.findings[0]
        more = len({finding.code for finding in run.findings}) - 1
        said = Text(
            f"{MARKS[worst.severity]} {worst.code}{f' +{more}' if more else ''}",
            STYLES[worst.severity],
        )
    else:
        said = Text("✓", "green") if run.complete else Text("none so far", "dim")
    return said.append(f" {run.ending}", "yellow") if run.ending else said


def _loss(run: RunSummary) -> Curve | None:
    return next((curve for curve in run.curves if curve.kind == "loss"), None)


def drawn_together(curves: Sequence[Curve | None], width: int) -> list[Text]:
    """Return curves as lines of blocks on one scale, logarithmic if no value is negative, and over the same steps."""
    known = [curve for curve in curves if curve is not None]
    if not known:
        return [Text("") for _ in curves]
    steps = max(int(curve.steps[-1]) for curve in known) + 1
    finite = np.concatenate(
        [curve.values[np.isfinite(curve.values) & ~curve.bad] for curve in known]
    )
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)

    def drawn(curve: Curve | None) -> Text:
        if curve is None:
            return Text("")
        values = np.where(curve.bad, np.nan, curve.values)
        if low < 0:
            values = 10 ** ((values - low) / ((high - low) or 1.0))
        places = curve.steps * width // max(steps, width)
        cells = np.full(width, np.nan)
        np.fmax.at(cells, places, values)
        broken = np.zeros(width, dtype=bool)
        broken[places[curve.bad | ~np.isfinite(curve.values)]] = True
        text = Text(sparkline(ScaleSeries(cells, broken, None, 0), width, ends), "cyan")
        text.highlight_regex(f"{NOT_FINITE}+", BAD)
        return text

    positive = finite[finite > 0]
    ends = (1.0, 10.0) if low < 0 else (positive.min(), positive.max()) if len(positive) else None
    return [drawn(curve) for curve in curves]
