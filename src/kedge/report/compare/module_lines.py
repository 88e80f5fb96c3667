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

#: The most modules of a table with a line each, unless all are asked for.
MOST_MODULES = 12

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
    def apart(self) -> float | None:
        """Its distance where it parts first; None if it never does."""
        if self.first is None:
            return None
        return self.first.apart

    @property
    def last(self) -> float:
        """Its distance in the last step in which it was compared."""
        known = self.course[~np.isnan(self.course)]
        if not len(known):
            return float("nan")
        return float(known[-1])


@dataclass(frozen=True, eq=False)
class FoldedDifference:
    """Modules that part in the same step at the same site, or one module alone.

    Their paths differ only in numbers.

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
        """Return the values in A and B, their distances, and the last distances, of each module."""
        a, b, apart = [], [], []
        for line in self.members:
            if line.first is not None:
                a.append(line.first.a)
                b.append(line.first.b)
                apart.append(line.first.apart)
        return a, b, apart, [line.last for line in self.members]


def each(parted: Sequence[ModuleDifference]) -> list[FoldedDifference]:
    """Return modules that part, each by itself."""
    return [FoldedDifference(line.same.label, _part(line), (line,)) for line in parted]


def folded(parted: Sequence[ModuleDifference]) -> list[FoldedDifference]:
    """Return modules that part, in the order in which they do.

    Alike ones share a line, except for the first of all.
    """
    made = each(parted[:1])
    folding = Folding(lambda line: line.same.a.label, _alike, differing=_outlying)
    for fold in folding.fold(parted[1:]):
        made.append(FoldedDifference(_label(fold), _part(fold.members[0]), fold.members))
    return made


def shown_folds(
    parted: Sequence[ModuleDifference],
    most: int | None,
) -> list[FoldedDifference]:
    """Return the lines of a table of modules that part: alike ones share a line if there are many.

    Args:
        parted: The modules in the order of parting.
        most: The most modules that have a line each; no limit if None.
    """
    if most is None or len(parted) <= most:
        return each(parted)
    return folded(parted)


def _alike(line: ModuleDifference) -> Hashable:
    same, first = line.same, line.first
    parts = first is not None and (first.step, np.isfinite(first.apart))
    name_in_b = None
    if same.a.path != same.b.path:
        name_in_b = pattern(same.b.label)
    return same.a.type, same.b.type, name_in_b, parts, _part(line)


def _outlying(group: Sequence[ModuleDifference]) -> list[int]:
    return outliers([line.apart for line in group])


def _label(one: Fold[ModuleDifference]) -> str:
    same = one.members[0].same
    if not one.folded:
        return same.label
    if same.a.path == same.b.path:
        return one.name
    names_in_b = folded_names(line.same.b.label for line in one.members)
    return f"{one.name} = {', '.join(names_in_b)}"


def _part(line: ModuleDifference) -> str:
    if line.first is None:
        return ""
    part = line.same.a.part(line.first.same.a).removeprefix(":")
    return f"{part} {line.first.statistic}"


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
    parted.sort(key=lambda item: item[:2])
    return [line for _, _, line in parted]


def in_order_of_leaving(comparison: Comparison) -> list[SameModule]:
    """Return the compared modules in the order in which they return: after their submodules."""
    ends: dict[int, int] = {}
    for site in comparison.alignment.sites:
        if site.kind == "out":
            ends.setdefault(id(site.module), site.a.id)

    def place(same: SameModule) -> tuple[bool, int]:
        return id(same) not in ends, ends.get(id(same), 0)

    return sorted(comparison.modules, key=place)


def grown(comparison: Comparison, kinds: Sequence[str]) -> Floats:
    """Return the distances of modules at sites of some kinds.

    Returns:
        A line for each module in the order in which they return, and a column for each step.
    """
    modules = in_order_of_leaving(comparison)
    sites = comparison.alignment.sites
    found = np.full((len(modules), len(comparison.steps)), np.nan)
    for i, same in enumerate(modules):
        places = [place for place in comparison.of_module(same) if sites[place].kind in kinds]
        if places:
            found[i] = np.fmax.reduce(comparison.apart[places], axis=0)
    return found


def drawn(distances: Floats, tolerance: float, width: int) -> str:
    """Return distances as blocks: one for each or, if they are too many, for the largest of some."""
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
