"""The table of a report: one line for each module, fitted to a width."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite

from rich.text import Text

from kedge.report.fitted_text import fit, joined
from kedge.report.module_lines import FoldedLine, ModuleLine
from kedge.report.sparkline import NOT_FINITE, ScaleSeries, sparkline
from kedge.short_text import brief, compact, thousands

BAD = "bold red"
FAINT = "dim"

LEAST_COURSE, MOST_COURSE = 10, 40
LEAST_LABEL, MOST_LABEL = 14, 60

Cell = Callable[[ModuleLine], "str | Text"]


@dataclass(frozen=True)
class TableColumn:
    """One column.

    Attributes:
        title: The title.
        width: The width in characters.
        cell: Returns the cell of a line.
        right: Whether cells are aligned to the right.
        key: Returns the key that a line is sorted by; None if the column cannot be sorted.
        falling: Whether the largest keys come first.
    """

    title: str
    width: int
    cell: Cell
    right: bool = False
    key: Callable[[ModuleLine], float | str] | None = None
    falling: bool = True

    def fitted(self, line: ModuleLine) -> Text:
        """Return the cell of one line in exactly the column's width."""
        return fit(self.cell(line), self.width, right=self.right)

    @property
    def head(self) -> Text:
        """The title in exactly the column's width."""
        return fit(self.title, self.width, right=self.right)


def columns(
    shown: Sequence[ModuleLine], steps: int, width: int, marks: Mapping[str, Text]
) -> list[TableColumn]:
    """Return the columns that are not empty and fit, with their widths.

    Args:
        shown: The lines of the table.
        steps: The number of measured steps.
        width: The most characters of a line.
        marks: The marks in front of lines, by label.
    """
    figures = _figures(shown)
    courses = [
        ("over the steps", flow)
        for flow in ("out", "gradient")
        if any(getattr(line, flow) for line in shown)
    ]
    longest = max([len(line.label) for line in shown], default=0)
    least_label = min(max(longest, LEAST_LABEL), 24)
    least_course = max(len("trend"), min(steps, LEAST_COURSE))
    least = least_label + len(courses) * min(max(steps, LEAST_COURSE), 14)
    for spare in ("zero", "update"):  # spreads may take more room than there is
        if _free(width, figures, courses) < least_label + len(courses) * least_course:
            figures.pop(spare, None)
    free = _free(width, figures, courses)
    details = []
    for column in _details(shown, widest_type=12 if width < 120 else 24):
        if free - column.width - 1 >= max(
            least, min(longest, MOST_LABEL) + len(courses) * least_course
        ):
            details.append(column)
            free -= column.width + 1
    course_width = max(
        least_course, min(steps, MOST_COURSE, (free - least_label) // max(len(courses), 1))
    )
    if any(isinstance(line, FoldedLine) for line in shown):  # its name has more to say
        course_width = max(
            least_course, min(course_width, (free - longest) // max(len(courses), 1))
        )
    label_width = max(LEAST_LABEL, min(longest, MOST_LABEL, free - len(courses) * course_width))
    chosen = [
        TableColumn("", 1, lambda line: marks.get(line.label, Text(""))),
        TableColumn("module", label_width, lambda line: line.label),
        *details,
    ]
    for name, column in figures.items():
        chosen.append(column)
        if name in ("out", "gradient"):
            chosen.append(
                TableColumn("trend", course_width, partial(_series, flow=name, width=course_width))
            )
    return chosen


def _free(
    width: int, figures: Mapping[str, TableColumn], courses: Sequence[tuple[str, str]]
) -> int:
    return width - 2 - sum(column.width + 1 for column in figures.values()) - len(courses)


def _figures(shown: Sequence[ModuleLine]) -> dict[str, TableColumn]:
    """Return the columns of figures that are not empty, by name."""
    made: list[tuple[str, TableColumn, Callable[[ModuleLine], bool]]] = [
        ("out", OUT, lambda line: line.out is not None),
        ("gradient", GRADIENT, lambda line: line.gradient is not None),
        ("update", UPDATE, lambda line: line.update is not None),
        ("zero", _ZERO, lambda line: line.zero is not None),
        ("broken", BROKEN, lambda line: line.broken > 0),
    ]
    return {
        name: wide_enough(column, shown)
        for name, column, said in made
        if any(said(line) for line in shown)
    }


def wide_enough(column: TableColumn, shown: Sequence[ModuleLine]) -> TableColumn:
    """Return a column that has room for the spreads of folded lines."""
    spreads = [column.cell(line) for line in shown if isinstance(line, FoldedLine)]
    return replace(column, width=max([column.width, *(len(cell) for cell in spreads)]))


def _details(shown: Sequence[ModuleLine], widest_type: int) -> list[TableColumn]:
    """Return the columns that a narrow terminal leaves out, the most important first."""
    types = max([len(line.type) for line in shown], default=0)
    shapes = max([len(line.shape) for line in shown], default=0)
    made = [
        TableColumn("type", min(max(types, 4), widest_type), lambda line: line.type),
        TableColumn("shape", min(max(shapes, 5), 18), lambda line: line.shape),
        TableColumn(
            "params", 6, lambda line: thousands(line.size) if line.size else "", right=True
        ),
    ]
    present = [types, shapes, max([line.size for line in shown], default=0)]
    return [column for column, some in zip(made, present, strict=True) if some]


def spread(values: Sequence[float], *, share: bool = False) -> Text:
    """Return the cell of a figure: its value, or the least and the largest of several; a dash without one."""
    if not values:
        return Text("-", FAINT)
    finite = [value for value in values if isfinite(value)]
    ends = [min(finite), max(finite)] if finite else []
    ends += [value for value in values if not isfinite(value)][:1]
    said = [
        f"{value:.0%}" if share else compact(value) if len(values) == 1 else brief(value)
        for value in ends
    ]
    if said[0] == said[-1]:
        said = said[:1] if share else [compact(ends[0])]
    text = said[0] if len(said) == 1 else f"{said[0].removesuffix('%')}..{said[-1]}"
    return Text(text, "" if len(finite) == len(values) else BAD)


def _broken_steps(line: ModuleLine) -> Text:
    """Return the cell of the number of steps with non-finite values; empty if there are none."""
    return Text(str(line.broken), BAD) if line.broken else Text("")


OUT = TableColumn("out", 7, lambda line: spread(line.newest("out")), right=True)
GRADIENT = TableColumn("grad", 7, lambda line: spread(line.newest("gradient")), right=True)
UPDATE = TableColumn("update", 7, lambda line: spread(line.newest("update")), right=True)
BROKEN = TableColumn(NOT_FINITE, 5, _broken_steps, right=True)
_ZERO = TableColumn("zero", 4, lambda line: spread(line.newest("zero"), share=True), right=True)


def over_steps(series: ScaleSeries | None, width: int, style: str) -> Text:
    """Return the cell of the sparkline of a series."""
    if series is None:
        return Text("")
    text = Text(sparkline(series, width), style)
    text.highlight_regex(f"{NOT_FINITE}+", BAD)
    return text


def _series(line: ModuleLine, flow: str, width: int) -> Text:
    return (
        over_steps(line.out, width, "cyan")
        if flow == "out"
        else over_steps(line.gradient, width, "green")
    )


def drawn(line: ModuleLine, chosen: Sequence[TableColumn]) -> Text:
    """Return one line of the table."""
    return joined([column.fitted(line) for column in chosen])


def header(chosen: Sequence[TableColumn]) -> Text:
    """Return the titles of the columns."""
    text = joined([column.head for column in chosen])
    text.stylize("bold")
    return text
