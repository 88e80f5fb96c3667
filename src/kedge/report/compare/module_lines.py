"""The lines of the table on two recordings: one for each module, with the growth of its difference."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.compare.alignment.sites import SameModule
from kedge.compare.comparison import Comparison, Parting
from kedge.report.sparkline import BLOCKS, GAP, NOT_FINITE, binned
from kedge.sites.folding import Fold, Folding, folded_names, outliers, pattern
from kedge.store.rows import Floats

#: The two halves of a step that are shown side by side.
FORWARD = ("param", "in", "out")
BACKWARD = ("out.grad", "param.grad", "grad.norm", "update")

EQUAL = "·"
#: The lowest block stands for all distances below this; each further one for ten times as much.
LOWEST = 1e-7


@dataclass(frozen=True, eq=False)
class ModuleDifference:
    """One module of both recordings.

    Attributes:
        same: The module.
        first: Its first parting; None if it never parts.
        place: The place of that site among all sites, for lines in the order of parting.
        course: Its distance in each step, the largest of all its sites; NaN where nothing was
            compared.
    """

    same: SameModule
    first: Parting | None
    place: int
    course: Floats

    @property
    def last(self) -> float:
        """Its distance in the last step in which it was compared."""
        known = self.course[~np.isnan(self.course)]
        return float(known[-1]) if len(known) else float("nan")


@dataclass(frozen=True, eq=False)
class FoldedDifference:
    """Modules whose paths differ only in numbers and that part in the same step at the same site, or one module alone.

    Attributes:
        label: Their name in A, and in B if that differs.
        part: The site and the statistic of their first partings: ``out max``, ``weight:update
            rms``.
        members: Their lines.
    """

    label: str
    part: str
    members: tuple[ModuleDifference, ...]

    @property
    def step(self) -> int:
        """The step in which they part."""
        return next(line.first.step for line in self.members if line.first is not None)

    @property
    def course(self) -> Floats:
        """The largest distance of any of them in each step."""
        return np.asarray(np.fmax.reduce([line.course for line in self.members]))

    def figures(self) -> tuple[list[float], ...]:
        """Return the values in A and B, their distances, and the last distances, each of all its modules."""
        first = [line.first for line in self.members if line.first is not None]
        last = [line.last for line in self.members]
        return (
            [one.a for one in first],
            [one.b for one in first],
            [one.apart for one in first],
            last,
        )


def each(parted: Sequence[ModuleDifference]) -> list[FoldedDifference]:
    """Return modules that part, each by itself."""
    return [FoldedDifference(line.same.label, _part(line), (line,)) for line in parted]


def folded(parted: Sequence[ModuleDifference]) -> list[FoldedDifference]:
    """Return modules that part, in the order in which they do; alike ones share a line, except for the first of all."""
    folds = Folding(lambda line: line.same.a.label, _alike, differing=_outlying).fold(parted[1:])
    return each(parted[:1]) + [
        FoldedDifference(_label(one), _part(one.members[0]), one.members) for one in folds
    ]


def _alike(line: ModuleDifference) -> Hashable:
    same, first = line.same, line.first
    sure = first is not None and (first.step, np.isfinite(first.apart))
    other = None if same.a.path == same.b.path else pattern(same.b.label)
    return same.a.type, same.b.type, other, sure, _part(line)


def _outlying(group: Sequence[ModuleDifference]) -> list[int]:
    return outliers([None if line.first is None else line.first.apart for line in group])


def _label(one: Fold[ModuleDifference]) -> str:
    same = one.members[0].same
    if not one.folded or same.a.path == same.b.path:
        return one.name if one.folded else same.label
    return f"{one.name} = {', '.join(folded_names(line.same.b.label for line in one.members))}"


def _part(line: ModuleDifference) -> str:
    if line.first is None:
        return ""
    return f"{line.same.a.part(line.first.same.a).removeprefix(':')} {line.first.statistic}"


def lines(comparison: Comparison) -> tuple[ModuleDifference, ...]:
    """Return a line for each compared module, in A's data-flow order."""
    return tuple(_line(comparison, same) for same in comparison.modules)


def _line(comparison: Comparison, same: SameModule) -> ModuleDifference:
    places = comparison.of_module(same)
    course = np.fmax.reduce(comparison.apart[places], axis=0)
    parted = comparison.parted[places]
    columns = np.flatnonzero(parted.any(axis=0))
    if not len(columns):
        return ModuleDifference(same, None, len(comparison.alignment.sites), course)
    column = int(columns[0])
    place = places[int(np.argmax(parted[:, column]))]
    return ModuleDifference(same, comparison.parting(place, column), place, course)


def in_order_of_parting(made: Sequence[ModuleDifference]) -> list[ModuleDifference]:
    """Return the lines that part, the first one first."""
    parted = [(line.first.step, line.place, line) for line in made if line.first is not None]
    return [line for _, _, line in sorted(parted, key=lambda item: item[:2])]


def in_order_of_leaving(comparison: Comparison) -> list[SameModule]:
    """Return the compared modules in the order in which they return: a module after its submodules."""
    ends = {id(s.module): s.a.id for s in reversed(comparison.alignment.sites) if s.kind == "out"}
    return sorted(
        comparison.modules, key=lambda same: (id(same) not in ends, ends.get(id(same), 0))
    )


def grown(comparison: Comparison, kinds: Sequence[str]) -> Floats:
    """Return the distances of modules at sites of some kinds.

    Returns:
        A line for each module in the order in which they return, and a column for each step.
    """
    modules = in_order_of_leaving(comparison)
    found = np.full((len(modules), len(comparison.steps)), np.nan)
    for i, same in enumerate(modules):
        places = [
            p for p in comparison.of_module(same) if comparison.alignment.sites[p].kind in kinds
        ]
        if places:
            found[i] = np.fmax.reduce(comparison.apart[places], axis=0)
    return found


def drawn(distances: Floats, tolerance: float, width: int) -> str:
    """Return distances as blocks, one for each or, if they are too many, for the largest of several."""
    return "".join(_block(distance, tolerance) for distance in binned(distances, width).tolist())


def _block(distance: float, tolerance: float) -> str:
    if np.isnan(distance):
        return GAP
    if distance <= tolerance:
        return EQUAL
    if np.isinf(distance):
        return NOT_FINITE
    level = np.floor(np.log10(distance / LOWEST)) + 1
    return BLOCKS[int(np.clip(level, 0, len(BLOCKS) - 1))]
