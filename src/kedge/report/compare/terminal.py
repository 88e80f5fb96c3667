"""Two recordings compared, drawn in a terminal."""

from __future__ import annotations

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
    FoldedDifference,
    drawn,
    each,
    folded,
    grown,
    in_order_of_parting,
    lines,
)
from kedge.report.fitted_text import fit, joined, print_paragraph
from kedge.report.module_table import spread
from kedge.report.sparkline import binned
from kedge.short_text import counted, listed
from kedge.sites.folding import folded_names
from kedge.store.recording import SiteInfo
from kedge.store.rows import Floats, Ints

#: The most modules and steps that are shown.
MOST_MODULES, MOST_STEPS = 12, 7
#: The most modules of one side alone, and the most renamings, that are named.
NAMED = 6
LEGEND = "· equal, ▁ under 1e-7 apart, each higher block ten times more, █ over 0.1"
BROKEN_LEGEND = ", ✗ not finite"
STEP_LABEL, WIDEST_CELL = 11, 4
STEP, FIGURE, LEAST_LABEL, LEAST_PART, MOST_PART = 6, 8, 14, 10, 24
READABLE_LABEL, WIDEST_LABEL, WIDEST_COURSE, LEAST_COURSE = 24, 44, 40, 8
FIGURES = ("A", "B", "apart", "at end")


def render(
    comparison: Comparison,
    verdict: Verdict,
    names: Names,
    console: Console,
    most: int | None = MOST_MODULES,
) -> None:
    """Print the comparison of two recordings: the verdict, their differences, and their common sites.

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
    for i, text in enumerate(told_verdict(verdict)):
        print_paragraph(text, console, 2 * (i > 0))
    if comparison.first is not None:
        console.print()
        for text in (
            *_map(comparison, console.width),
            Text(),
            *_table(comparison, console.width, most),
        ):
            console.print(text)
    elif (
        verdict.first is not None and comparison.modules
    ):  # what parts is not among the chosen sites
        console.print()
        console.print(Text(_rest(0, len(comparison.modules), comparison.tolerance), "dim"))
    console.print()
    for text in _common(comparison):
        print_paragraph(text, console)


def _map(comparison: Comparison, width: int) -> Iterator[Text]:
    """Yield the growth of the difference: modules from left to right, steps from top to bottom."""
    halves = [
        (name, grown(comparison, kinds))
        for name, kinds in (("forward", FORWARD), ("backward", BACKWARD))
    ]
    halves = [(name, distances) for name, distances in halves if not np.isnan(distances).all()]
    if not halves:  # only losses or parameters can be compared
        return
    room = (width - STEP_LABEL - 1) // len(halves) - 1
    each = max(1, min(WIDEST_CELL, room // len(comparison.modules)))
    room = max(min(room, each * len(comparison.modules)), len("backward"))
    yield joined([" " * STEP_LABEL, *(fit(name, room, right=False) for name, _ in halves)], "bold")
    for column in _shown_steps(comparison):
        label = fit(f"step {comparison.steps[column]}", STEP_LABEL, right=False)
        strips = (
            _strip(np.repeat(distances[:, column], each), comparison, room)
            for _, distances in halves
        )
        yield joined([label, *strips])
    yield Text(LEGEND + BROKEN_LEGEND * bool(np.isinf(comparison.apart).any()), "dim")


def _strip(distances: Floats, comparison: Comparison, room: int) -> Text:
    text = Text(drawn(distances, comparison.tolerance, room), "yellow")
    text.pad_right(room - text.cell_len)
    text.highlight_regex("[·]+", "dim")
    text.highlight_regex("[▆▇█✗]+", "red")
    return text


def _shown_steps(comparison: Comparison) -> list[int]:
    """Return the columns of the step before they part, the first one, the next, and some up to the last."""
    first = int(np.flatnonzero(comparison.parted.any(axis=0))[0])
    last = len(comparison.steps) - 1
    rest = np.linspace(first, last, MOST_STEPS - 2).round().astype(int).tolist()
    return sorted({max(first - 1, 0), min(first + 1, last), *rest})


def _table(comparison: Comparison, width: int, most: int | None) -> Iterator[Text]:
    """Yield the table of the modules that part, the first one first; of many, those that are alike share a line."""
    made = lines(comparison)
    parted = in_order_of_parting(made)
    folds = each(parted) if most is None or len(parted) <= most else folded(parted)
    shown = folds[:most]
    if not shown:  # only losses part
        return
    cells = [_figures(line) for line in shown]
    parts = min(max(LEAST_PART, *(len(line.part) for line in shown)), MOST_PART)
    longest = max(len(line.label) for line in shown)
    titles, cells = _fitting(cells, width - STEP - parts - 3 - min(longest, READABLE_LABEL))
    widths = [max(FIGURE, *(len(row[i]) for row in cells)) for i in range(len(titles))]
    figures = STEP + parts + sum(widths) + 2 + len(titles)
    label = max(min(longest, WIDEST_LABEL, width - figures), LEAST_LABEL)
    course = min(width - figures - label - 1, WIDEST_COURSE, len(comparison.steps))
    course = course if course >= min(LEAST_COURSE, len(comparison.steps)) else 0
    titles = ("step", "first in", *titles)
    all_widths = (STEP, parts, *widths)
    yield joined(
        [fit("module", label, right=False), *_cells(titles, all_widths), _course_title(course)],
        "bold",
    )
    for line, row in zip(shown, cells, strict=True):
        strip = _strip(binned(line.course, course), comparison, course) if course else ""
        yield joined(
            [
                fit(line.label, label, right=False),
                *_cells((str(line.step), line.part, *row), all_widths),
                strip,
            ]
        )
    hidden = sum(len(line.members) for line in folds[len(shown) :])
    equal = [line for line in made if line.first is None]
    yield Text(_rest(hidden, len(equal), comparison.tolerance), "dim")


def _fitting(cells: list[list[str]], width: int) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return the titles and the cells of the figures that fit: without the last distance, and then without those of A and B."""
    kept = list(range(len(FIGURES)))
    for spare in ({3}, {0, 1}):
        if sum(max(FIGURE, *(len(row[i]) for row in cells)) + 1 for i in kept) > width:
            kept = [i for i in kept if i not in spare]
    return tuple(FIGURES[i] for i in kept), [[row[i] for i in kept] for row in cells]


def _course_title(width: int) -> str:
    return next((title for title in ("over the steps", "steps") if len(title) <= width), "")


def _figures(line: FoldedDifference) -> list[str]:
    return [spread(values).plain for values in line.figures()]


def _cells(texts: Sequence[str], widths: Sequence[int]) -> list[Text]:
    cells = zip(texts, widths, strict=True)
    return [fit(text, width, right=i != 1) for i, (text, width) in enumerate(cells)]


def _rest(hidden: int, equal: int, tolerance: float) -> str:
    parts = (
        [f"{counted(hidden, 'module')} more differ{'s' * (hidden == 1)}: --all shows every one"]
        if hidden
        else []
    )
    how = "within the tolerance" if tolerance else "to the last bit"
    parts.append(
        f"{counted(equal, 'module')} {'is' if equal == 1 else 'are'} equal {how} in all steps"
        if equal
        else "no module is equal in all steps"
    )
    return "; ".join(parts)


def _common(comparison: Comparison) -> Iterator[Text]:
    """Yield the aligned sites, and those that could not be compared."""
    alignment = comparison.alignment
    yield Text(f"{_aligned(comparison)}; {_steps(comparison)}", "dim")
    for one, other, n in alignment.renames[:NAMED]:
        yield Text.assemble(
            "  ",
            (one or "(root)", SIDES["A"]),
            " is ",
            (other or "(root)", SIDES["B"]),
            f" in B: {counted(n, 'module')}",
        )
    if len(alignment.renames) > NAMED:
        yield Text(f"  and {len(alignment.renames) - NAMED} more renamings")
    for same in alignment.modules:
        if not same.kept:
            yield Text(f"  changed: {change_between(same.a, same.b)}", "yellow")
    for side, modules, sites in (
        ("A", alignment.only_a, alignment.sites_a),
        ("B", alignment.only_b, alignment.sites_b),
    ):
        if modules or sites:
            yield Text(f"  only in {side}: {_only(modules, sites)}", "yellow")


def _aligned(comparison: Comparison) -> str:
    alignment = comparison.alignment
    hows = [same.how for same in alignment.modules]
    named = {
        "name": "by name",
        "wrapper": "without wrappers",
        "prefix": "without a prefix",
        "structure": "by structure",
        "changed": "as changed",
    }
    ways = [f"{hows.count(how)} {words}" for how, words in named.items() if how in hows]
    how = ways[0].partition(" ")[2] if len(ways) == 1 else ", ".join(ways)
    sites, modules = (
        counted(len(alignment.sites), "site"),
        counted(len(alignment.modules), "module"),
    )
    return f"{sites} of {modules} aligned {how}".rstrip()  # a loss alone has no module


def _steps(comparison: Comparison) -> str:
    steps = comparison.steps
    amount = f"{counted(len(steps), 'step')} measured in both ({_extent(steps)})"
    if comparison.full < len(steps):
        amount += f", {comparison.full} of them in full; to compare every step, record both with --every 1 --budget none"
    return amount


def _extent(steps: Ints) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def _only(modules: Sequence[RecordedModule], sites: Sequence[SiteInfo]) -> str:
    return listed(folded_modules(modules) + folded_names(site.site for site in sites), NAMED)
