"""The first lines on two recordings: their names, the verdict, and where they differ first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.text import Text

from kedge.compare.circumstances import circumstances
from kedge.compare.comparison import Comparison, Parting
from kedge.compare.measures import coarser
from kedge.compare.operations.finding import OperationFinding
from kedge.compare.verdict import Verdict
from kedge.short_text import compact, listed, percent
from kedge.shown_text import typed

SIDES = {"A": "cyan", "B": "magenta"}
PARTED, SAME = ("✗", "bold red"), ("✓", "bold green")

#: Above this ratio of two values, the ratio is written instead of their distance.
MANY_TIMES = 1.5
#: Larger distances are written in percent.
LEAST_PERCENT = 0.0005
#: More units in the last place than this are not written.
MOST_ULPS = 10_000
#: The least and the most digits of a value.
DIGITS = range(4, 17)


@dataclass(frozen=True)
class Names:
    """The names of the two recordings."""

    a: str
    b: str


def head(comparison: Comparison, names: Names) -> Iterator[Text]:
    """Yield the names and commands of two recordings, and how their circumstances differ."""
    width = max(len(names.a), len(names.b))
    sides = (("A", names.a, comparison.a), ("B", names.b, comparison.b))
    for side, name, recording in sides:
        line = Text.assemble((side, f"bold {SIDES[side]}"), f"  {name:<{width}}")
        command = recording.manifest.get("command")
        if command:
            line.append(f"  {typed(*command)}", "dim")
        yield line
    for found in circumstances(comparison.a, comparison.b):
        before = (found.a or "-", SIDES["A"])
        after = (found.b or "-", SIDES["B"])
        yield Text.assemble(f"   {found.name}: ", before, " → ", after)


def told_verdict(verdict: Verdict) -> Iterator[Text]:
    """Yield the verdict: whether they part, the cause, and the first place."""
    mark, style = SAME
    told = "first expected difference"
    if verdict.parted:
        mark, style = PARTED
        told = "first difference"
    yield Text(f"{mark} {verdict.headline}", style)
    for finding in verdict.departures:
        yield Text(f"· {finding.message}")
    first = verdict.first
    if first is not None:
        where = (f"step {first.step}, {first.same.text}", "bold")
        yield Text.assemble(f"{told}: ", where, f": {told_parting(first)}")
    yield Text(verdict.cause.evidence, "dim")
    if verdict.operation is not None:
        yield from _told_operation(verdict.operation)


def _told_operation(found: OperationFinding) -> Iterator[Text]:
    """Yield what second runs say: the operation, its line in either program, and what was seen."""
    yield Text.assemble("operation: ", (found.headline, "bold"))
    for side, operations in (("A", found.a), ("B", found.b)):
        for each in operations:
            line = f"  {each.place or 'no line'}: {each.name or each.module}"
            yield Text.assemble((side, f"bold {SIDES[side]}"), line, f"  {each.text}")
    yield Text(found.evidence, "dim")
    if found.written:
        yield Text(f"the second runs have written: {listed(found.written)}", "dim")


def told_parting(parting: Parting) -> str:
    """Return a statistic in A and in B, and the distance of the two, as text."""
    a, b = _digits(parting)
    return f"{parting.statistic} {a} in A, {b} in B, {told_distance(parting)}"


def told_distance(parting: Parting) -> str:
    """Return the distance of two values as text, in a form that suits its size."""
    a, b = parting.a, parting.b
    distance = parting.apart
    if distance == float("inf"):
        return "one of them is not finite"
    if parting.statistic == "zero":
        return f"a difference of {percent(distance)} of the values"
    if a * b > 0 and not 1 / MANY_TIMES < b / a < MANY_TIMES:
        return f"B is {compact(b / a)} times A"
    if distance >= LEAST_PERCENT:
        told = f"{percent(distance)} apart"
    else:
        told = f"{compact(distance)} apart"
    if parting.ulps is not None and parting.ulps <= MOST_ULPS:
        same = parting.same
        told += f", {compact(parting.ulps)} ulp of {coarser(same.a.dtype, same.b.dtype)}"
    return told


def _digits(parting: Parting) -> tuple[str, str]:
    """Return two values with enough digits to differ."""
    for digits in DIGITS:
        a = f"{parting.a:.{digits}g}"
        b = f"{parting.b:.{digits}g}"
        if a != b:
            break
    return a, b
