"""The first lines on two recordings: which they are, the verdict, and where they first part."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from rich.text import Text

from kedge.compare.circumstances import circumstances
from kedge.compare.comparison import Comparison, Parting
from kedge.compare.measures import coarser
from kedge.compare.verdict import Verdict
from kedge.numbers import compact, percent

SIDES = {"A": "cyan", "B": "magenta"}
PARTED, SAME = ("✗", "bold red"), ("✓", "bold green")

#: Where one value is more than so many times the other, that number says more than their distance.
MANY_TIMES = 1.5
#: Distances above this are written in percent.
LEAST_PERCENT = 0.0005
#: More units in the last place than this say nothing.
MOST_ULPS = 10_000
#: Digits that a value has at least and at most.
DIGITS = range(4, 17)


@dataclass(frozen=True)
class Names:
    """What the two recordings are called."""

    a: str
    b: str


def head(comparison: Comparison, names: Names) -> Iterator[Text]:
    """Say which two recordings they are, and what differs in how they were made."""
    width = max(len(names.a), len(names.b))
    for side, name, recording in (("A", names.a, comparison.a), ("B", names.b, comparison.b)):
        command = recording.manifest.get("command")
        typed = f"  {shlex.join(map(str, command))}" if command else ""
        yield Text.assemble((side, f"bold {SIDES[side]}"), f"  {name:<{width}}", (typed, "dim"))
    for found in circumstances(comparison.a, comparison.b):
        text = Text(f"   {found.name}: ")
        yield text.append(found.a or "-", SIDES["A"]).append(" → ").append(found.b or "-", SIDES["B"])


def told_verdict(verdict: Verdict) -> Iterator[Text]:
    """Say whether they part, why, and where first."""
    mark, style = PARTED if verdict.parted else SAME
    yield Text(f"{mark} {verdict.cause.headline}", style)
    if verdict.first is not None:
        told = "first apart" if verdict.parted else "first apart, as they may be,"
        where = (f"step {verdict.first.step}, {verdict.first.same.text}", "bold")
        yield Text.assemble(f"{told} at ", where, f": {told_parting(verdict.first)}")
    yield Text(verdict.cause.evidence, "dim")


def told_parting(parting: Parting) -> str:
    """Say how large a statistic is in A and in B, and how far the two are apart."""
    a, b = _digits(parting)
    return f"{parting.statistic} {a} in A, {b} in B, {told_distance(parting)}"


def told_distance(parting: Parting) -> str:
    """Say how far two values are apart, in the words that suit the distance."""
    a, b, distance = parting.a, parting.b, parting.apart
    if distance == float("inf"):
        return "one of them has values that are not finite"
    if parting.statistic == "zero":
        return f"a difference of {percent(distance)} of the values"
    if a * b > 0 and not 1 / MANY_TIMES < b / a < MANY_TIMES:
        return f"B is {compact(b / a)} times A"
    size = percent(distance) if distance >= LEAST_PERCENT else compact(distance)
    if parting.ulps is None or parting.ulps > MOST_ULPS:
        return f"{size} apart"
    return f"{size} apart, {compact(parting.ulps)} ulp of {coarser(parting.same.a.dtype, parting.same.b.dtype)}"


def _digits(parting: Parting) -> tuple[str, str]:
    """Write two values with so many digits that they can be told apart."""
    for digits in DIGITS:
        a, b = f"{parting.a:.{digits}g}", f"{parting.b:.{digits}g}"
        if a != b:
            break
    return a, b
