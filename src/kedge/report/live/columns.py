"""The columns of the live table: the cell of each module, and the key it is sorted by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isnan

from rich.text import Text

from kedge.report.module_lines import ModuleLine
from kedge.report.module_table import (
    BROKEN,
    FAINT,
    GRADIENT,
    OUT,
    UPDATE,
    TableColumn,
    over_steps,
    wide_enough,
)
from kedge.report.sparkline import ScaleSeries

LEAST_NAME, MOST_NAME = 16, 48
LEAST_COURSE, MOST_COURSE = 8, 40
#: Narrower terminals go without the types, and then without the updates.
NARROW, NARROWER = 100, 72
#: The columns that are left out one after the other where there is no room for all.
SPARE = ("broken", "gradient course", "out course", "update", "gradient", "out")


def layout(width: int, lines: Sequence[ModuleLine]) -> tuple[TableColumn, ...]:
    """Return the columns fitted to a width: all of a line is visible.

    Args:
        width: The most characters of a line.
        lines: The lines of the table.
    """
    longest = max((len(line.label) for line in lines), default=0)
    chosen = _chosen(width, lines)
    courses = [name for name in chosen if name.endswith("course")]
    free = (
        width - sum(chosen[name].width + 1 for name in chosen if name not in courses) - len(courses)
    )
    name = max(min(LEAST_NAME, free), min(longest, MOST_NAME, free - len(courses) * LEAST_COURSE))
    course = max(LEAST_COURSE, min(MOST_COURSE, (free - name) // max(len(courses), 1)))
    title = "over the steps" if course >= len("over the steps") else "course"
    drawn = {
        "out course": TableColumn(title, course, lambda line: over_steps(line.out, course, "cyan")),
        "gradient course": TableColumn(
            title, course, lambda line: over_steps(line.gradient, course, "green")
        ),
    }
    module = TableColumn("module", name, lambda line: line.label, key=_label, falling=False)
    return (module, *(drawn.get(name, column) for name, column in chosen.items()))


def _chosen(width: int, lines: Sequence[ModuleLine]) -> dict[str, TableColumn]:
    """Return the columns beside the name that there is room for, by what they show; curves in their least width."""
    course = TableColumn("course", LEAST_COURSE, lambda _: "")
    made = {
        "type": _TYPE,
        "out": wide_enough(_OUT, lines),
        "out course": course,
        "gradient": wide_enough(_GRADIENT, lines),
        "gradient course": course,
        "update": wide_enough(_UPDATE, lines),
        "broken": _BROKEN,
    }
    if width < NARROW:
        del made["type"]
    if width < NARROWER:
        del made["update"]
    spare = [name for name in SPARE if name != "broken" or not any(line.broken for line in lines)]
    for name in spare:
        if LEAST_NAME + sum(column.width + 1 for column in made.values()) <= width:
            break
        made.pop(name, None)
    return made


def in_order(
    lines: Sequence[ModuleLine], column: TableColumn | None, turned: bool
) -> list[ModuleLine]:
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


_TYPE = TableColumn("type", 14, lambda line: Text(line.type, FAINT), key=_kind, falling=False)
_OUT = replace(OUT, key=lambda line: _scale(line.out))
_GRADIENT = replace(GRADIENT, key=lambda line: _scale(line.gradient))
_UPDATE = replace(UPDATE, key=_update)
_BROKEN = replace(BROKEN, key=lambda line: float(line.broken))
