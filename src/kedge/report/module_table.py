"""The columns of a table of modules, for a report and for the live screen, each fitted to a width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite, isnan

from rich.text import Text

from kedge.report.curves import ScaleSeries
from kedge.report.findings import MARKS, STYLES
from kedge.report.module_lines import FoldedLine, ModuleLine
from kedge.report.sparkline import BAD, NOT_FINITE
from kedge.report.table import Column
from kedge.rules.rule import SEVERITIES, Finding
from kedge.short_text import brief, compact, thousands

FAINT = "dim"

#: The widths of a report: the least and the most of a curve, and of a name.
LEAST_COURSE, MOST_COURSE = 10, 40
LEAST_LABEL, MOST_LABEL = 14, 60

#: The widths of the live screen.
LEAST_LIVE_NAME, MOST_LIVE_NAME = 16, 48
LEAST_LIVE_COURSE, MOST_LIVE_COURSE = 8, 40
#: Narrower live screens go without the types.
NARROW = 100
#: Still narrower ones also go without the updates.
NARROWER = 72
#: The columns that the live screen leaves out one after the other where there is no room for all.
SPARE = ("broken", "gradient course", "out course", "update", "gradient", "out")

ModuleColumn = Column[ModuleLine]


def spread(values: Sequence[float], *, share: bool = False) -> Text:
    """Return the cell of a figure: its value, or the least and the largest of several.

    It is a dash without a value.
    """
    if not values:
        return Text("-", FAINT)
    ends = []
    finite = [value for value in values if isfinite(value)]
    if finite:
        ends = [min(finite), max(finite)]
    ends += [value for value in values if not isfinite(value)][:1]

    if share:
        said = [f"{value:.0%}" for value in ends]
    elif len(values) == 1:
        said = [compact(value) for value in ends]
    else:
        said = [brief(value) for value in ends]

    if said[0] != said[-1]:
        text = f"{said[0].removesuffix('%')}..{said[-1]}"
    elif share:
        text = said[0]
    else:
        text = compact(ends[0])
    if len(finite) < len(values):
        return Text(text, BAD)
    return Text(text)


def _scale(series: ScaleSeries | None) -> float:
    """Return the key that a series is sorted by; non-finite values are the largest of all."""
    if series is None or series.last is None:
        return float("nan")
    if isnan(series.last):
        return float("inf")
    return abs(series.last)


def _update(line: ModuleLine) -> float:
    if line.update is None:
        return float("nan")
    return line.update


def _broken_steps(line: ModuleLine) -> Text:
    if not line.broken:
        return Text("")
    return Text(str(line.broken), BAD)


def _kind(line: ModuleLine) -> str:
    return line.type


def _label(line: ModuleLine) -> str:
    return line.label


_OUT = ModuleColumn(
    "out",
    7,
    lambda line: spread(line.newest("out")),
    right=True,
    key=lambda line: _scale(line.out),
)
_GRADIENT = ModuleColumn(
    "grad",
    7,
    lambda line: spread(line.newest("gradient")),
    right=True,
    key=lambda line: _scale(line.gradient),
)
_UPDATE = ModuleColumn(
    "update",
    7,
    lambda line: spread(line.newest("update")),
    right=True,
    key=_update,
)
_ZERO = ModuleColumn(
    "zero",
    4,
    lambda line: spread(line.newest("zero"), share=True),
    right=True,
)
_FORWARD = ModuleColumn(
    "fwd ms",
    6,
    lambda line: spread(line.newest("forward")),
    right=True,
    key=lambda line: line.forward or float("nan"),
)
_BACKWARD = ModuleColumn(
    "bwd ms",
    6,
    lambda line: spread(line.newest("backward")),
    right=True,
    key=lambda line: line.backward or float("nan"),
)
_BROKEN = ModuleColumn(
    NOT_FINITE,
    5,
    _broken_steps,
    right=True,
    key=lambda line: float(line.broken),
)
_LIVE_TYPE = ModuleColumn(
    "type",
    14,
    lambda line: Text(line.type, FAINT),
    key=_kind,
    falling=False,
)


def _out_course(title: str, width: int) -> ModuleColumn:
    return ModuleColumn(title, width, lambda line: _course(line.out, width, "cyan"))


def _gradient_course(title: str, width: int) -> ModuleColumn:
    return ModuleColumn(title, width, lambda line: _course(line.gradient, width, "green"))


def _course(series: ScaleSeries | None, width: int, style: str) -> str | Text:
    if series is None:
        return ""
    return series.drawn(width, style)


def _wide_enough(column: ModuleColumn, shown: Sequence[ModuleLine]) -> ModuleColumn:
    """Return a column that has room for the spreads of folded lines."""
    widths = [len(column.cell(line)) for line in shown if isinstance(line, FoldedLine)]
    return replace(column, width=max([column.width, *widths]))


def _taken(columns: Iterable[ModuleColumn]) -> int:
    """Return the characters of some columns, with a space before each."""
    return sum(column.width + 1 for column in columns)


def columns(
    shown: Sequence[ModuleLine], steps: int, width: int, marks: Mapping[str, Text]
) -> list[ModuleColumn]:
    """Return the columns of a report that are not empty and fit, with their widths.

    Args:
        shown: The lines of the table.
        steps: The number of measured steps.
        width: The most characters of a line.
        marks: The marks in front of lines, by label.
    """
    figures = {}
    if any(line.out is not None for line in shown):
        figures["out"] = _wide_enough(_OUT, shown)
    if any(line.gradient is not None for line in shown):
        figures["gradient"] = _wide_enough(_GRADIENT, shown)
    if any(line.update is not None for line in shown):
        figures["update"] = _wide_enough(_UPDATE, shown)
    if any(line.zero is not None for line in shown):
        figures["zero"] = _wide_enough(_ZERO, shown)
    if any(line.forward is not None for line in shown):
        figures["forward"] = _wide_enough(_FORWARD, shown)
    if any(line.backward is not None for line in shown):
        figures["backward"] = _wide_enough(_BACKWARD, shown)
    if any(line.broken > 0 for line in shown):
        figures["broken"] = _wide_enough(_BROKEN, shown)

    courses = {"out", "gradient"} & figures.keys()
    longest = max([len(line.label) for line in shown], default=0)
    least_label = min(max(longest, LEAST_LABEL), 24)
    least_course = max(len("trend"), min(steps, LEAST_COURSE))
    widest_type = 12 if width < 120 else 24
    width -= 2 + len(courses)  # the marks, and a space before each curve

    # Spreads may take more room than there is.
    for spare in ("zero", "update"):
        if width - _taken(figures.values()) < least_label + len(courses) * least_course:
            figures.pop(spare, None)
    free = width - _taken(figures.values())

    # The columns that a narrow terminal leaves out, the most important first.
    wanted = max(
        least_label + len(courses) * min(max(steps, LEAST_COURSE), 14),
        min(longest, MOST_LABEL) + len(courses) * least_course,
    )
    details = []
    for column in _details(shown, widest_type):
        if free - column.width - 1 >= wanted:
            details.append(column)
            free -= column.width + 1

    each = max(len(courses), 1)
    course = max(least_course, min(steps, MOST_COURSE, (free - least_label) // each))
    if any(isinstance(line, FoldedLine) for line in shown):  # its name has more to say
        course = max(least_course, min(course, (free - longest) // each))
    label = max(LEAST_LABEL, min(longest, MOST_LABEL, free - len(courses) * course))

    chosen = [
        ModuleColumn("", 1, lambda line: marks.get(line.label, "")),
        ModuleColumn("module", label, _label),
        *details,
    ]
    for name, column in figures.items():
        chosen.append(column)
        if name == "out":
            chosen.append(_out_course("trend", course))
        if name == "gradient":
            chosen.append(_gradient_course("trend", course))
    return chosen


def _details(shown: Sequence[ModuleLine], widest_type: int) -> list[ModuleColumn]:
    """Return the columns of types, shapes and numbers of parameters, as far as they are not empty."""
    made = []
    longest_type = max([len(line.type) for line in shown], default=0)
    if longest_type:
        width = min(max(longest_type, 4), widest_type)
        made.append(ModuleColumn("type", width, _kind))
    longest_shape = max([len(line.shape) for line in shown], default=0)
    if longest_shape:
        width = min(max(longest_shape, 5), 18)
        made.append(ModuleColumn("shape", width, lambda line: line.shape))
    if any(line.size for line in shown):
        made.append(ModuleColumn("params", 6, _parameters, right=True))
    return made


def _parameters(line: ModuleLine) -> str:
    if not line.size:
        return ""
    return thousands(line.size)


def live_columns(width: int, lines: Sequence[ModuleLine]) -> tuple[ModuleColumn, ...]:
    """Return the columns of the live screen fitted to a width: all of a line is visible.

    Args:
        width: The most characters of a line.
        lines: The lines of the table.
    """
    made = {
        "type": _LIVE_TYPE,
        "out": _wide_enough(_OUT, lines),
        "out course": _out_course("course", LEAST_LIVE_COURSE),
        "gradient": _wide_enough(_GRADIENT, lines),
        "gradient course": _gradient_course("course", LEAST_LIVE_COURSE),
        "update": _wide_enough(_UPDATE, lines),
        "broken": _BROKEN,
    }
    if width < NARROW:
        del made["type"]
    if width < NARROWER:
        del made["update"]
    is_broken = any(line.broken for line in lines)
    for name in SPARE:
        if LEAST_LIVE_NAME + _taken(made.values()) <= width:
            break
        if name != "broken" or not is_broken:
            made.pop(name, None)

    # The name and the curves share what the other columns leave.
    courses = [name for name in ("out course", "gradient course") if name in made]
    figures = [column for name, column in made.items() if name not in courses]
    free = width - _taken(figures) - len(courses)
    longest = max((len(line.label) for line in lines), default=0)
    widest_name = min(longest, MOST_LIVE_NAME, free - len(courses) * LEAST_LIVE_COURSE)
    name_width = max(min(LEAST_LIVE_NAME, free), widest_name)
    each = (free - name_width) // max(len(courses), 1)
    course = max(LEAST_LIVE_COURSE, min(MOST_LIVE_COURSE, each))
    title = "over the steps"
    if course < len(title):
        title = "course"
    if "out course" in made:
        made["out course"] = _out_course(title, course)
    if "gradient course" in made:
        made["gradient course"] = _gradient_course(title, course)
    names = ModuleColumn("module", name_width, _label, key=_label, falling=False)
    return names, *made.values()


def in_order(
    lines: Sequence[ModuleLine], column: ModuleColumn | None, turned: bool
) -> list[ModuleLine]:
    """Return lines sorted by a column; lines without a key come last in either order.

    Args:
        lines: The lines in data-flow order.
        column: The column to sort by; the order stays if None.
        turned: Whether to reverse the order.
    """
    if column is None or column.key is None:
        return list(reversed(lines) if turned else lines)
    known = []
    unknown = []
    for line in lines:
        key = column.key(line)
        if isinstance(key, float) and isnan(key):
            unknown.append(line)
        else:
            known.append((key, line))
    known.sort(key=lambda pair: pair[0], reverse=column.falling != turned)
    return [line for _, line in known] + unknown


def marks_of(
    lines: Sequence[ModuleLine],
    findings: Sequence[Finding],
) -> dict[str, Text]:
    """Return the marks of lines with findings, by label: each of its worst severity."""
    severities = {finding.site: finding.severity for finding in reversed(findings)}
    marks = {}
    for line in lines:
        own = {severities[text] for text in line.texts if text in severities}
        worst = next((severity for severity in SEVERITIES if severity in own), None)
        if worst is not None:
            marks[line.label] = Text(MARKS[worst], STYLES[worst])
    return marks
