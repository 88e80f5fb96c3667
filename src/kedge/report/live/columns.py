"""The columns of the live table: the cell of each module, and the key it is sorted by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan

from rich.text import Text

from kedge.report.fitted_text import fit, tail
from kedge.report.module_lines import ModuleLine
from kedge.report.module_table import FAINT, broken_steps, figure, newest, over_steps
from kedge.report.sparkline import NOT_FINITE, ScaleSeries

LEAST_NAME, MOST_NAME = 16, 48
LEAST_COURSE, MOST_COURSE = 8, 40
#: Narrower terminals go without the types, and then without the updates.
NARROW, NARROWER = 100, 72


@dataclass(frozen=True)
class LiveColumn:
    """One column of the live table.

    Attributes:
        title: The title.
        width: The width in characters.
        cell: Returns the cell of a line.
        key: Returns the key that a line is sorted by; None if the column cannot be sorted.
        right: Whether cells are aligned to the right.
        falling: Whether the largest keys come first.
    """

    title: str
    width: int
    cell: Callable[[ModuleLine, int], Text]
    key: Callable[[ModuleLine], float | str] | None = None
    right: bool = False
    falling: bool = True

    def fitted(self, line: ModuleLine) -> Text:
        """Return the cell of one line in exactly the column's width."""
        return fit(self.cell(line, self.width), self.width, right=self.right)


def layout(width: int, longest: int) -> tuple[LiveColumn, ...]:
    """Return the columns fitted to a width.

    Args:
        width: The most characters of a line.
        longest: The length of the longest label.
    """
    details = (_TYPE,) if width >= NARROW else ()
    last = (_UPDATE, _BROKEN) if width >= NARROWER else (_BROKEN,)
    figures = (_OUT, _GRADIENT, *last)
    free = width - sum(column.width + 1 for column in (*details, *figures)) - 2
    name = max(LEAST_NAME, min(longest, MOST_NAME, free - 2 * LEAST_COURSE))
    course = max(LEAST_COURSE, min(MOST_COURSE, (free - name) // 2))
    out = LiveColumn("over the steps", course, lambda line, wide: over_steps(line.out, wide, "cyan"))
    gradient = LiveColumn("over the steps", course, lambda line, wide: over_steps(line.gradient, wide, "green"))
    module = LiveColumn("module", name, lambda line, wide: Text(tail(line.label, wide)), _label, falling=False)
    return (module, *details, _OUT, out, _GRADIENT, gradient, *last)


def in_order(lines: Sequence[ModuleLine], column: LiveColumn | None, turned: bool) -> list[ModuleLine]:
    """Return lines sorted by a column; lines without a key come last in either order.

    Args:
        lines: The lines in data-flow order.
        column: The column to sort by; the order stays if None.
        turned: Whether to reverse the order.
    """
    if column is None or column.key is None:
        return list(reversed(lines)) if turned else list(lines)
    keys = [(column.key(line), line) for line in lines]
    known = [pair for pair in keys if not _is_nan(pair[0])]
    known.sort(key=lambda pair: pair[0], reverse=column.falling != turned)
    return [line for _, line in known] + [line for key, line in keys if _is_nan(key)]


def _is_nan(key: float | str) -> bool:
    return isinstance(key, float) and isnan(key)


def _label(line: ModuleLine) -> str:
    return line.label


def _kind(line: ModuleLine) -> str:
    return line.type


def _scale(series: ScaleSeries | None) -> float:
    """Return the key that a series is sorted by; non-finite values are the largest of all."""
    if series is None or series.last is None:
        return float("nan")
    return float("inf") if isnan(series.last) else abs(series.last)


def _update(line: ModuleLine) -> float:
    return float("nan") if line.update is None else line.update


_TYPE = LiveColumn("type", 14, lambda line, _: Text(line.type, FAINT), _kind, falling=False)
_OUT = LiveColumn("out", 7, lambda line, _: newest(line.out), lambda line: _scale(line.out), right=True)
_GRADIENT = LiveColumn("grad", 7, lambda line, _: newest(line.gradient), lambda line: _scale(line.gradient), right=True)
_UPDATE = LiveColumn("update", 7, lambda line, _: figure(line.update), _update, right=True)
_BROKEN = LiveColumn(NOT_FINITE, 5, lambda line, _: broken_steps(line), lambda line: float(line.broken), right=True)
