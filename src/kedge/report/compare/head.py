"""The first lines on two recordings: their names, the verdict, and the first place where they differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.text import Text

from kedge.compare.circumstances import circumstances
from kedge.compare.comparison import Comparison, Parting
from kedge.compare.measures import coarser
from kedge.compare.verdict import Verdict
from kedge.short_text import compact, percent
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
    """Yield the names and commands of the two recordings, and the differences of their circumstances."""
    width = max(len(names.a), len(names.b))
    for side, name, recording in (("A", names.a, comparison.a), ("B", names.b, comparison.b)):
        command = recording.manifest.get("command")
        line = f"  {typed(*command)}" if command else ""
        yield Text.assemble((side, f"bold {SIDES[side]}"), f"  {name:<{width}}", (line, "dim"))
    for found in circumstances(comparison.a, comparison.b):
        text = Text(f"   {found.name}: ")
        yield (
            text.append(found.a or "-", SIDES["A"]).append(" → ").append(found.b or "-", SIDES["B"])
        )


def told_verdict(verdict: Verdict) -> Iterator[Text]:
    """Yield the verdict: whether they part, the cause, and the first place."""
    mark, style = PARTED if verdict.parted else SAME
    yield Text(f"{mark} {verdict.cause.headline}", style)
    if verdict.first is not None:
        told = "first difference" if verdict.parted else "first expected difference"
        where = (f"step {verdict.first.step}, {verdict.first.same.text}", "bold")
        yield Text.assemble(f"{told}: ", where, f": {told_parting(verdict.first)}")
    yield Text(verdict.cause.evidence, "dim")


def told_parting(parting: Parting) -> str:
    """Return a statistic in A and in B, and the distance of the two, as text."""
    a, b = _digits(parting)
    return f"{parting.statistic} {a} in A, {b} in B, {told_distance(parting)}"


def told_distance(parting: Parting) -> str:
    """Return the distance of two values as text, in a form that suits its size."""
    a, b, distance = parting.a, parting.b, parting.apart
    if distance == float("inf"):
        return "one of them is not finite"
    if parting.statistic == "zero":
        return f"a difference of {percent(distance)} of the values"
    if a * b > 0 and not 1 / MANY_TIMES < b / a < MANY_TIMES:
        return f"B is {compact(b / a)} times A"
    size = percent(distance) if distance >= LEAST_PERCENT else compact(distance)
    if parting.ulps is None or parting.ulps > MOST_ULPS:
        return f"{size} apart"
    return f"{size} apart, {compact(parting.ulps)} ulp of {coarser(parting.same.a.dtype, parting.same.b.dtype)}"


def _digits(parting: Parting) -> tuple[str, str]:
    """Return two values with enough digits to differ."""
    for digits in DIGITS:
        a, b = f"{parting.a:.{digits}g}", f"{parting.b:.{digits}g}"
        if a != b:
            break
    return a, b
