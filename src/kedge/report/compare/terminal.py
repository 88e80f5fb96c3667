"""Two recordings compared, drawn in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from kedge.compare.alignment.modules import RecordedModule
from kedge.compare.comparison import Comparison
from kedge.compare.verdict import Verdict
from kedge.compare.wording import change_between, folded_modules
from kedge.report.compare.head import SIDES, Names, head, told_verdict
from kedge.report.compare.module_lines import (
    BACKWARD,
    FORWARD,
    MOST_MODULES,
    FoldedDifference,
    drawn,
    grown,
    in_order_of_parting,
    lines,
    shown_folds,
)
from kedge.report.fitted_text import fit, joined, print_paragraph
from kedge.report.module_table import spread
from kedge.report.sparkline import binned
from kedge.report.table import Column, widest
from kedge.short_text import counted, listed
from kedge.sites.folding import folded_names
from kedge.store.recording import SiteInfo
from kedge.store.rows import Floats

#: The most steps that are shown.
MOST_STEPS = 7
#: The most modules of one side alone, and the most renamings, that are named.
NAMED = 6
LEGEND = "· equal, ▁ under 1e-7 apart, each higher block ten times more, █ over 0.1"
BROKEN_LEGEND = ", ✗ not finite"
STEP_LABEL, WIDEST_CELL = 11, 4
STEP, FIGURE, LEAST_LABEL, LEAST_PART, MOST_PART = 6, 8, 14, 10, 24
READABLE_LABEL, WIDEST_LABEL, WIDEST_COURSE, LEAST_COURSE = 24, 44, 40, 8
FIGURES = ("A", "B", "apart", "at end")
#: The ways in which modules were aligned, in words.
WAYS = {
    "name": "by name",
    "wrapper": "without wrappers",
    "prefix": "without a prefix",
    "structure": "by structure",
    "changed": "as changed",
}


def render(
    comparison: Comparison,
    verdict: Verdict,
    names: Names,
    console: Console,
    most: int | None = MOST_MODULES,
) -> None:
    """Print a comparison: the verdict, the differences, and the common sites.

    Args:
        comparison: The comparison, or the chosen part of it.
        verdict: The verdict on all of it.
        names: The names of the recordings.
        console: The console to print to.
        most: The most modules in the table; all of them if None.
    """
    for text in head(comparison, names):
        print_paragraph(text, console)
    console.print()
    headline, *more = told_verdict(verdict)
    print_paragraph(headline, console)
    for text in more:
        print_paragraph(text, console, 2)
    if comparison.first is not None:
        console.print()
        for text in _map(comparison, console.width):
            console.print(text)
        console.print(Text())
        for text in _table(comparison, console.width, most):
            console.print(text)
    elif verdict.first is not None and comparison.modules:
        # What parts is not among the chosen sites.
        console.print()
        console.print(Text(_rest(0, len(comparison.modules), comparison.tolerance), "dim"))
    console.print()
    for text in _common(comparison):
        print_paragraph(text, console)


def _map(comparison: Comparison, width: int) -> Iterator[Text]:
    """Yield the growth of the difference: modules from left to right, steps from top to bottom."""
    halves = []
    for name, kinds in (("forward", FORWARD), ("backward", BACKWARD)):
        distances = grown(comparison, kinds)
        if not np.isnan(distances).all():
            halves.append((name, distances))
    if not halves:  # only losses or parameters can be compared
        return
    room = (width - STEP_LABEL - 1) // len(halves) - 1
    each = max(1, min(WIDEST_CELL, room // len(comparison.modules)))
    room = max(min(room, each * len(comparison.modules)), len("backward"))

    titles = [fit(name, room, right=False) for name, _ in halves]
    yield joined([" " * STEP_LABEL, *titles], "bold")
    for column in _shown_steps(comparison):
        cells = [fit(f"step {comparison.steps[column]}", STEP_LABEL, right=False)]
        for _, distances in halves:
            widened = np.repeat(distances[:, column], each)
            cells.append(_strip(widened, comparison, room))
        yield joined(cells)
    legend = LEGEND
    if np.isinf(comparison.apart).any():
        legend += BROKEN_LEGEND
    yield Text(legend, "dim")


def _strip(distances: Floats, comparison: Comparison, room: int) -> Text:
    text = Text(drawn(distances, comparison.tolerance, room), "yellow")
    text.pad_right(room - text.cell_len)
    text.highlight_regex("[·]+", "dim")
    text.highlight_regex("[▆▇█✗]+", "red")
    return text


def _shown_steps(comparison: Comparison) -> list[int]:
    """Return the columns of the step before they part, of that one, the next, and some more."""
    first = int(np.flatnonzero(comparison.parted.any(axis=0))[0])
    last = len(comparison.steps) - 1
    rest = np.linspace(first, last, MOST_STEPS - 2).round().astype(int).tolist()
    return sorted({max(first - 1, 0), min(first + 1, last), *rest})


def _table(comparison: Comparison, width: int, most: int | None) -> Iterator[Text]:
    """Yield the table of the modules that part, the first one first."""
    made = lines(comparison)
    folds = shown_folds(in_order_of_parting(made), most)
    shown = folds[:most]
    if not shown:  # only losses part
        return

    part = widest("first in", shown, lambda line: line.part, least=LEAST_PART, most=MOST_PART)
    longest = max(len(line.label) for line in shown)
    room = width - STEP - part.width - 3 - min(longest, READABLE_LABEL)
    figures = _figures(shown, room)
    taken = STEP + part.width + sum(column.width for column in figures) + 2 + len(figures)
    label = max(min(longest, WIDEST_LABEL, width - taken), LEAST_LABEL)
    course = min(width - taken - label - 1, WIDEST_COURSE, len(comparison.steps))
    if course < min(LEAST_COURSE, len(comparison.steps)):
        course = 0
    layout: list[Column[FoldedDifference]] = [
        Column("module", label, lambda line: line.label),
        Column("step", STEP, lambda line: str(line.step), right=True),
        part,
        *figures,
    ]

    title = next((title for title in ("over the steps", "steps") if len(title) <= course), "")
    yield joined([*(column.head for column in layout), title], "bold")
    for line in shown:
        cells = [column.fitted(line) for column in layout]
        if course:
            cells.append(_strip(binned(line.course, course), comparison, course))
        yield joined(cells)
    hidden = sum(len(line.members) for line in folds[len(shown) :])
    equal = [line for line in made if line.first is None]
    yield Text(_rest(hidden, len(equal), comparison.tolerance), "dim")


def _figures(
    shown: Sequence[FoldedDifference],
    width: int,
) -> list[Column[FoldedDifference]]:
    """Return the columns of figures that fit: all, without the last distance, or the first one."""

    def column(title: str, place: int) -> Column[FoldedDifference]:
        def cell(line: FoldedDifference) -> str:
            return spread(line.figures()[place]).plain

        return widest(title, shown, cell, least=FIGURE, right=True)

    a, b, apart, at_end = (column(title, place) for place, title in enumerate(FIGURES))
    for fitting in ([a, b, apart, at_end], [a, b, apart]):
        if sum(column.width + 1 for column in fitting) <= width:
            return fitting
    return [apart]


def _rest(hidden: int, equal: int, tolerance: float) -> str:
    parts = []
    if hidden == 1:
        parts.append("1 module more differs: --all shows every one")
    elif hidden:
        parts.append(f"{counted(hidden, 'module')} more differ: --all shows every one")

    how = "to the last bit"
    if tolerance:
        how = "within the tolerance"
    if equal == 0:
        parts.append("no module is equal in all steps")
    elif equal == 1:
        parts.append(f"1 module is equal {how} in all steps")
    else:
        parts.append(f"{counted(equal, 'module')} are equal {how} in all steps")
    return "; ".join(parts)


def _common(comparison: Comparison) -> Iterator[Text]:
    """Yield the aligned sites, and those that could not be compared."""
    alignment = comparison.alignment
    yield Text(f"{_aligned(comparison)}; {_steps(comparison)}", "dim")
    for one, other, number in alignment.renames[:NAMED]:
        old = (one or "(root)", SIDES["A"])
        new = (other or "(root)", SIDES["B"])
        yield Text.assemble("  ", old, " is ", new, f" in B: {counted(number, 'module')}")
    if len(alignment.renames) > NAMED:
        yield Text(f"  and {len(alignment.renames) - NAMED} more renamings")
    for same in alignment.modules:
        if not same.kept:
            yield Text(f"  changed: {change_between(same.a, same.b)}", "yellow")
    if alignment.only_a or alignment.sites_a:
        only = _only(alignment.only_a, alignment.sites_a)
        yield Text(f"  only in A: {only}", "yellow")
    if alignment.only_b or alignment.sites_b:
        only = _only(alignment.only_b, alignment.sites_b)
        yield Text(f"  only in B: {only}", "yellow")


def _aligned(comparison: Comparison) -> str:
    alignment = comparison.alignment
    numbers = Counter[str](same.how for same in alignment.modules)
    used = [way for way in WAYS if numbers[way]]
    if len(used) == 1:
        how = WAYS[used[0]]
    else:
        how = ", ".join(f"{numbers[way]} {WAYS[way]}" for way in used)
    sites = counted(len(alignment.sites), "site")
    modules = counted(len(alignment.modules), "module")
    return f"{sites} of {modules} aligned {how}".rstrip()  # a loss alone has no module


def _steps(comparison: Comparison) -> str:
    steps = comparison.steps
    extent = f"step {steps[0]}"
    if len(steps) > 1:
        extent = f"{steps[0]} to {steps[-1]}"
    amount = f"{counted(len(steps), 'step')} measured in both ({extent})"
    if comparison.full == len(steps):
        return amount
    return (
        f"{amount}, {comparison.full} of them in full; "
        "to compare every step, record both with --every 1 --budget none"
    )


def _only(modules: Sequence[RecordedModule], sites: Sequence[SiteInfo]) -> str:
    return listed(folded_modules(modules) + folded_names(site.site for site in sites), NAMED)
