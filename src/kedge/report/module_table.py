"""The table of a report: one line a module, fitted to a width."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite

from rich.text import Text

from kedge.numbers import compact, thousands
from kedge.report.module_lines import Line
from kedge.report.sparkline import NOT_FINITE, Course, picture

BAD = "bold red"
FAINT = "dim"

LEAST_COURSE, MOST_COURSE = 10, 40
LEAST_LABEL, MOST_LABEL = 14, 60

Cell = Callable[[Line], "str | Text"]


@dataclass(frozen=True)
class Column:
    """One column: what it is called, how wide it is, and what it says of a line."""

    title: str
    width: int
    cell: Cell
    right: bool = False

    def fitted(self, line: Line) -> Text:
        """Give the cell of one line in exactly the column's width."""
        return fit(self.cell(line), self.width, right=self.right)

    @property
    def head(self) -> Text:
        """The title in exactly the column's width."""
        return fit(self.title, self.width, right=self.right)


def fit(content: str | Text, width: int, *, right: bool) -> Text:
    """Cut or fill a text to a width; what is cut off is marked."""
    text = content.copy() if isinstance(content, Text) else Text(content)
    if text.cell_len > width:
        text.truncate(width, overflow="ellipsis")
    pad = text.pad_left if right else text.pad_right
    pad(width - text.cell_len)
    return text


def tail(label: str, width: int) -> str:
    """Shorten a path from the left: its end tells more."""
    return label if len(label) <= width else "…" + label[len(label) - width + 1 :]


def columns(shown: Sequence[Line], steps: int, width: int, marks: Mapping[str, Text]) -> list[Column]:
    """Choose the columns that have something to say and fit, and how wide they are.

    Args:
        shown: The lines of the table.
        steps: How many steps were sampled.
        width: How wide a line of the table may be.
        marks: What stands in front of a line, by its label.
    """
    figures = _figures(shown)
    courses = [("over the steps", flow) for flow in ("out", "gradient") if any(getattr(line, flow) for line in shown)]
    free = width - 2 - sum(column.width + 1 for column in figures.values()) - len(courses)
    longest = max([len(line.label) for line in shown], default=0)
    least_label = min(max(longest, LEAST_LABEL), 24)
    least = least_label + len(courses) * min(max(steps, LEAST_COURSE), 14)
    details = []
    for column in _details(shown, widest_type=12 if width < 120 else 24):
        if free - column.width - 1 >= least:
            details.append(column)
            free -= column.width + 1
    course_width = max(LEAST_COURSE, min(steps, MOST_COURSE, (free - least_label) // max(len(courses), 1)))
    label_width = max(LEAST_LABEL, min(longest, MOST_LABEL, free - len(courses) * course_width))
    chosen = [
        Column("", 1, lambda line: marks.get(line.label, Text(""))),
        Column("module", label_width, lambda line: tail(line.label, label_width)),
        *details,
    ]
    for name, column in figures.items():
        chosen.append(column)
        if name in ("out", "gradient"):
            chosen.append(Column("course", course_width, partial(_course, flow=name, width=course_width)))
    return chosen


def _figures(shown: Sequence[Line]) -> dict[str, Column]:
    """Give the columns of figures that at least one line has something for."""
    made: list[tuple[str, Column, Callable[[Line], bool]]] = [
        ("out", Column("out", 7, lambda line: _scale(line.out), right=True), lambda line: line.out is not None),
        (
            "gradient",
            Column("grad", 7, lambda line: _scale(line.gradient), right=True),
            lambda line: line.gradient is not None,
        ),
        (
            "update",
            Column("update", 7, lambda line: _number(line.update), right=True),
            lambda line: line.update is not None,
        ),
        ("zero", Column("zero", 4, lambda line: _share(line.zero), right=True), lambda line: line.zero is not None),
        ("broken", Column(NOT_FINITE, 5, _broken, right=True), lambda line: line.broken > 0),
    ]
    return {name: column for name, column, said in made if any(said(line) for line in shown)}


def _details(shown: Sequence[Line], widest_type: int) -> list[Column]:
    """Give the columns that a narrow terminal goes without, the dearest first."""
    types = max([len(line.type) for line in shown], default=0)
    shapes = max([len(line.shape) for line in shown], default=0)
    made = [
        Column("type", min(max(types, 4), widest_type), lambda line: line.type),
        Column("shape", min(max(shapes, 5), 18), lambda line: line.shape),
        Column("params", 6, lambda line: thousands(line.size) if line.size else "", right=True),
    ]
    present = [types, shapes, max([line.size for line in shown], default=0)]
    return [column for column, some in zip(made, present, strict=True) if some]


def _scale(followed: Course | None) -> Text:
    return _number(followed.last if followed else None)


def _number(value: float | None) -> Text:
    if value is None:
        return Text("-", FAINT)
    return Text(compact(value), "" if isfinite(value) else BAD)


def _share(value: float | None) -> Text:
    return Text("-", FAINT) if value is None else Text(f"{value:.0%}")


def _broken(line: Line) -> Text:
    return Text(str(line.broken), BAD) if line.broken else Text("")


def _course(line: Line, flow: str, width: int) -> Text:
    followed: Course | None = getattr(line, flow)
    if followed is None:
        return Text("")
    text = Text(picture(followed, width), "cyan" if flow == "out" else "green")
    text.highlight_regex(f"{NOT_FINITE}+", BAD)
    return text


def drawn(line: Line, chosen: Sequence[Column]) -> Text:
    """Draw one line of the table."""
    return _joined([column.fitted(line) for column in chosen])


def header(chosen: Sequence[Column]) -> Text:
    """Draw the titles of the columns."""
    text = _joined([column.head for column in chosen])
    text.stylize("bold")
    return text


def _joined(cells: Sequence[Text]) -> Text:
    text = Text(" ", no_wrap=True).join(cells)
    text.rstrip()
    return text
