"""Several runs in a terminal: the table, and the loss of each on one scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from kedge.numbers import compact, counted, seconds, sized
from kedge.report.curves import Curve
from kedge.report.findings import MARKS, STYLES
from kedge.report.fitted_text import cut, fit, joined, print_paragraph
from kedge.report.module_table import BAD
from kedge.report.runs.smoothing import KEPT
from kedge.report.runs.summary import RunSummary
from kedge.report.runs.table import RunColumn, RunTable
from kedge.report.sparkline import NOT_FINITE, ScaleSeries, sparkline

MOST_NAME, MOST_OPTION = 26, 18
LEAST_COURSE, MOST_COURSE = 12, 40
#: The columns of figures that a terminal shows as far as they fit; the first two always.
SHOWN = ("loss", "best", "steps", "norm", "seconds_per_step", "saved", "best_step", "seconds", "started")

Cells = list[tuple[str, list[Text], bool]]


def render_runs(table: RunTable, console: Console) -> None:
    """Print several runs: what they have in common, and a line for each."""
    for line in heading(table):
        print_paragraph(line, console)
    console.print()
    cells, left = _fitting(table, console.width)
    widths = [max(len(title), *(cell.cell_len for cell in own)) for title, own, _ in cells]
    course = min(console.width - sum(widths) - len(widths), MOST_COURSE)
    curves = drawn_together([_loss(run) for run in table.runs], course) if course >= LEAST_COURSE else None
    titles = [fit(title, width, right=right) for (title, _, right), width in zip(cells, widths, strict=True)]
    head = joined([*titles, "loss over the steps" if curves and course >= 19 else "loss" if curves else ""])
    head.stylize("bold")
    console.print(head)
    for place in range(len(table.runs)):
        line = [fit(own[place], width, right=right) for (_, own, right), width in zip(cells, widths, strict=True)]
        console.print(joined([*line, curves[place] if curves else ""]))
    console.print()
    for one in table.left_out:
        print_paragraph(Text(f"left out: {one.recording}: {one.reason}", "yellow"), console)
    if left:
        print_paragraph(Text(f"{counted(len(left), 'column')} more with --html or --json: {', '.join(left)}"), console)
    print_paragraph(_legend(drawn=curves is not None), console)


def heading(table: RunTable) -> Iterator[Text]:
    """Yield the number of runs, and what is equal in all of them."""
    yield Text(counted(len(table.runs), "run"), "bold")
    equal = {name: value for name, value in table.differing.equal.items() if (name, value) != ("ranks", "1")}
    if equal and len(table.runs) > 1:
        yield Text("the same in all: " + " · ".join(told_option(*option) for option in equal.items()))


def told_option(name: str, value: str) -> str:
    """Return an option and its value as text; a program is its value alone."""
    if name in ("program", "model", "device"):
        return value
    return name if value == "yes" and name.startswith("-") else f"{name} {value}"


def _fitting(table: RunTable, width: int) -> tuple[Cells, list[str]]:
    """Return the columns that fit beside a course, with their cells, and the titles of those that do not."""
    figures = {column.key: column for column in table.figures}
    first, *others = [figures[key] for key in SHOWN if key in figures] or [None]
    names = [Text(cut(run.name, MOST_NAME), "bold") for run in table.runs]
    chosen: Cells = [("run", names, False), ("findings", [told_findings(run) for run in table.runs], False)]
    chosen += [_cells(first, table.runs)] if first else []
    room = width - LEAST_COURSE - sum(_width(cells) + 1 for cells in chosen)
    left: list[str] = []
    options = [_cells(column, table.runs) for column in table.options]
    kept: list[str] = []
    for cells in (*options, *(_cells(column, table.runs) for column in others)):
        if _width(cells) + 1 > room:
            left.append(cells[0])
            continue
        room -= _width(cells) + 1
        kept.append(cells[0])
        chosen.append(cells)
    place = {title: at for at, title in enumerate(["run", "findings", *(cells[0] for cells in options)])}
    return sorted(chosen, key=lambda cells: place.get(cells[0], len(place))), left


def _width(cells: tuple[str, list[Text], bool]) -> int:
    return max(len(cells[0]), *(cell.cell_len for cell in cells[1]))


def _cells(column: RunColumn, runs: Sequence[RunSummary]) -> tuple[str, list[Text], bool]:
    return cut(column.title, MOST_OPTION), [told(column, column.value(run)) for run in runs], column.kind != "option"


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
        said = Text(f"{MARKS[worst.severity]} {worst.code}{f' +{more}' if more else ''}", STYLES[worst.severity])
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
    finite = np.concatenate([curve.values[np.isfinite(curve.values) & ~curve.bad] for curve in known])
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


def _legend(*, drawn: bool) -> Text:
    figures = (
        f"loss, best loss, grad norm: an exponential moving average that keeps {KEPT:.0%} at each value; "
        "findings: the worst, and how many kinds more. "
    )
    scale = "Losses are drawn on one scale, over the same steps; ✗ not finite. " if drawn else ""
    return Text(f"{figures}{scale}kedge report RUN describes one run, kedge diff A B finds where two part.", "dim")
