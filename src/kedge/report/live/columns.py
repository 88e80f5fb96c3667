"""The columns of the live table: what each shows of a module, and how it is sorted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan

from rich.text import Text

from kedge.numbers import compact
from kedge.report.module_lines import Line
from kedge.report.module_table import BAD, FAINT, fit, tail
from kedge.report.sparkline import NOT_FINITE, Course, picture

LEAST_NAME, MOST_NAME = 16, 48
LEAST_COURSE, MOST_COURSE = 8, 40
#: Narrower terminals go without the types, and then without the updates.
NARROW, NARROWER = 100, 72


@dataclass(frozen=True)
class Column:
    """One column of the live table.

    Attributes:
        title: What stands above it.
        width: How wide it is.
        cell: What it says of a line.
        key: What lines are sorted by, the largest first if ``falling``; None where it cannot be sorted.
        right: Whether it is set to the right.
        falling: Whether the largest come first.
    """

    title: str
    width: int
    cell: Callable[[Line, int], Text]
    key: Callable[[Line], float | str] | None = None
    right: bool = False
    falling: bool = True

    def fitted(self, line: Line) -> Text:
        """Give the cell of one line in exactly the column's width."""
        return fit(self.cell(line, self.width), self.width, right=self.right)


def layout(width: int, longest: int) -> tuple[Column, ...]:
    """Fit the columns to a width.

    Args:
        width: How wide a line may be.
        longest: The length of the longest label.
    """
    details = (_TYPE,) if width >= NARROW else ()
    last = (_UPDATE, _BROKEN) if width >= NARROWER else (_BROKEN,)
    figures = (_OUT, _GRADIENT, *last)
    free = width - sum(column.width + 1 for column in (*details, *figures)) - 2
    name = max(LEAST_NAME, min(longest, MOST_NAME, free - 2 * LEAST_COURSE))
    course = max(LEAST_COURSE, min(MOST_COURSE, (free - name) // 2))
    out = Column("over the steps", course, lambda line, wide: _course(line.out, wide, "cyan"))
    gradient = Column("over the steps", course, lambda line, wide: _course(line.gradient, wide, "green"))
    module = Column("module", name, lambda line, wide: Text(tail(line.label, wide)), _label, falling=False)
    return (module, *details, _OUT, out, _GRADIENT, gradient, *last)


def in_order(lines: Sequence[Line], column: Column | None, turned: bool) -> list[Line]:
    """Sort lines; those with nothing to say come last, whichever way round.

    Args:
        lines: The lines in data-flow order.
        column: What to sort by; the order stays if None.
        turned: The other way round.
    """
    if column is None or column.key is None:
        return list(reversed(lines)) if turned else list(lines)
    keys = [(column.key(line), line) for line in lines]
    known = [pair for pair in keys if not _is_nan(pair[0])]
    known.sort(key=lambda pair: pair[0], reverse=column.falling != turned)
    return [line for _, line in known] + [line for key, line in keys if _is_nan(key)]


def _is_nan(key: float | str) -> bool:
    return isinstance(key, float) and isnan(key)


def _label(line: Line) -> str:
    return line.label


def _kind(line: Line) -> str:
    return line.type


def _scale(course: Course | None) -> float:
    """Give what a course is sorted by; what is not finite is the largest of all."""
    if course is None or course.last is None:
        return float("nan")
    return float("inf") if isnan(course.last) else abs(course.last)


def _number(value: float | None) -> Text:
    if value is None:
        return Text("-", FAINT)
    return Text(compact(value), "" if abs(value) < float("inf") else BAD)


def _last(course: Course | None) -> Text:
    return _number(course.last if course else None)


def _course(course: Course | None, width: int, style: str) -> Text:
    if course is None:
        return Text("")
    text = Text(picture(course, width), style)
    text.highlight_regex(f"{NOT_FINITE}+", BAD)
    return text


def _update(line: Line) -> float:
    return float("nan") if line.update is None else line.update


def _broken(line: Line, _: int) -> Text:
    return Text(str(line.broken), BAD) if line.broken else Text("")


_TYPE = Column("type", 14, lambda line, _: Text(line.type, FAINT), _kind, falling=False)
_OUT = Column("out", 7, lambda line, _: _last(line.out), lambda line: _scale(line.out), right=True)
_GRADIENT = Column("grad", 7, lambda line, _: _last(line.gradient), lambda line: _scale(line.gradient), right=True)
_UPDATE = Column("update", 7, lambda line, _: _number(line.update), _update, right=True)
_BROKEN = Column(NOT_FINITE, 5, _broken, lambda line: float(line.broken), right=True)
