"""Two recordings, compared at every site and in every step that both have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kedge.compare.alignment.modules import RecordedModule
from kedge.compare.alignment.sites import Alignment, SameModule, SameSite, align
from kedge.compare.measures import COMPARED, COUNTS, ChosenRows, Compared, apart, coarser, eps
from kedge.errors import CannotCompare, NoSuchSite
from kedge.short_text import counted
from kedge.sites.filters import chosen_sites
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Bools, Floats, Ints, Rows

#: The number of steps that a message names.
NAMED_STEPS = 3
#: Less than any distance.
NOT_MEASURED = -1.0


@dataclass(frozen=True)
class Parting:
    """One difference of two recordings: one statistic of one site in one step.

    Attributes:
        step: The step.
        same: The site.
        statistic: Its statistic that differs most.
        a: The statistic in A.
        b: The statistic in B.
        apart: The distance of the two, see Note [Apart].
    """

    step: int
    same: SameSite
    statistic: Compared
    a: float
    b: float
    apart: float

    @property
    def ulps(self) -> float | None:
        """The distance in units of the last place of the site's dtype, the coarser of the two."""
        size = eps(coarser(self.same.a.dtype, self.same.b.dtype))
        if size is None or self.statistic in COUNTS:
            return None
        return self.apart / size


@dataclass(frozen=True, eq=False)
class Comparison:
    """The common sites and steps of two recordings, and the distances of their values.

    The matrices have a line for each of ``alignment.sites`` and a column for each of ``steps``.

    Attributes:
        a: The first recording.
        b: The second.
        alignment: The pairs of their modules and sites.
        steps: The steps in which some site was measured in both.
        tolerance: The largest distance of values that count as equal.
        apart: Their distances, NaN where nothing was measured in both.
        which: The number in ``COMPARED`` of the statistic with the largest distance.
    """

    a: Recording
    b: Recording
    alignment: Alignment
    steps: Ints
    tolerance: float
    apart: Floats
    which: NDArray[np.int8]

    @cached_property
    def parted(self) -> Bools:
        """Whether the distance exceeds the tolerance, for each site and step."""
        return np.greater(self.apart, self.tolerance)

    @cached_property
    def values(self) -> int:
        """The number of pairs of a site and a step that were compared."""
        return int(np.count_nonzero(~np.isnan(self.apart)))

    @cached_property
    def modules(self) -> tuple[SameModule, ...]:
        """The modules with a compared site, in A's order of the data."""
        compared = {id(self.alignment.sites[i].module) for i in self._measured}
        return tuple(same for same in self.alignment.modules if id(same) in compared)

    @property
    def _measured(self) -> list[int]:
        return [int(i) for i in np.flatnonzero((~np.isnan(self.apart)).any(axis=1))]

    @cached_property
    def full(self) -> int:
        """The number of steps that are measured in full in both."""
        return len(np.intersect1d(self.a.steps, self.b.steps, assume_unique=True))

    @cached_property
    def unlike(self) -> int:
        """The number of steps that are measured in full in one recording alone."""
        alone = np.setxor1d(self.a.steps, self.b.steps, assume_unique=True)
        return int(np.isin(self.steps, alone).sum())

    @cached_property
    def first(self) -> Parting | None:
        """The first difference: in the first step with one, at its first site in the data's order."""
        columns = np.flatnonzero(self.parted.any(axis=0))
        if not len(columns):
            return None
        column = int(columns[0])
        return self.parting(int(np.argmax(self.parted[:, column])), column)

    def parting(self, site: int, step: int) -> Parting:
        """Return the difference of two sites in one step, by their places in the matrices."""
        same = self.alignment.sites[site]
        statistic = COMPARED[self.which[site, step]]
        a, b = self.pair(site, step, statistic)
        return Parting(int(self.steps[step]), same, statistic, a, b, float(self.apart[site, step]))

    def pair(self, site: int, step: int, statistic: Compared) -> tuple[float, float]:
        """Return one statistic of a site in one step, in A and in B, by its places in the matrices."""
        same = self.alignment.sites[site]
        found = []
        for rows in (self.a.rows(same.a), self.b.rows(same.b)):
            place = np.searchsorted(rows.step, self.steps[step])
            found.append(float(rows.statistic(statistic)[place]))
        return found[0], found[1]

    def of_module(self, same: SameModule) -> list[int]:
        """Return the places of a module's sites."""
        return self._places.get(id(same), [])

    @cached_property
    def _places(self) -> dict[int, list[int]]:
        places: dict[int, list[int]] = {}
        for i, site in enumerate(self.alignment.sites):
            places.setdefault(id(site.module), []).append(i)
        return places


def compare(a: Recording, b: Recording, tolerance: float = 0.0) -> Comparison:
    """Compare two recordings.

    Args:
        a: The first recording.
        b: The second.
        tolerance: The largest distance of values that count as equal, see Note [Apart].

    Raises:
        CannotCompare: They have no site or no step in common.
    """
    alignment = align(a, b)
    if not alignment.sites:
        raise CannotCompare(_no_site(a, b))
    places = [_common(a.rows(same.a), b.rows(same.b), same.kind) for same in alignment.sites]
    steps = _union(found for found, _, _ in places)
    if not len(steps):
        raise CannotCompare(_no_step(a, b))
    far = np.full((len(places), len(steps)), NOT_MEASURED)
    which = np.zeros(far.shape, dtype=np.int8)
    for i, (same, (found, here, there)) in enumerate(zip(alignment.sites, places, strict=True)):
        where: Indices = slice(None)
        if len(found) < len(steps):
            where = np.searchsorted(steps, found)
        one = ChosenRows(a.rows(same.a), here)
        other = ChosenRows(b.rows(same.b), there)
        for number, (_, distance) in enumerate(apart(one, other)):
            more = distance > far[i, where]
            which[i, where] = np.where(more, number, which[i, where])
            far[i, where] = np.fmax(far[i, where], distance)

    far[far == NOT_MEASURED] = np.nan
    measured = ~np.isnan(far).all(axis=0)
    return Comparison(
        a=a,
        b=b,
        alignment=alignment,
        steps=steps[measured],
        tolerance=tolerance,
        apart=far[:, measured],
        which=which[:, measured],
    )


Indices = Ints | slice


def _common(a: Rows, b: Rows, kind: str) -> tuple[Ints, Indices, Indices]:
    """Return the steps in which both have the same kind of value, and their places in either.

    Between measured steps a parameter's gradient is recorded only if one is not finite: it is
    compared with others of its kind alone. An update has some of the elements: other numbers of
    them mean other elements.
    """
    one, other = a.step, b.step  # what must be equal beside the step
    if kind == "param.grad":
        one, other = a.level, b.level
    elif kind == "update":
        one, other = a.count, b.count
    if np.array_equal(a.step, b.step) and np.array_equal(one, other):
        return a.step, slice(None), slice(None)
    common, here, there = np.intersect1d(a.step, b.step, assume_unique=True, return_indices=True)
    same = one[here] == other[there]
    return common[same], here[same], there[same]


def _union(steps: Iterator[Ints]) -> Ints:
    """Return all steps of several sites, most of which have the same ones."""
    distinct = {found.tobytes(): found for found in steps}
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *distinct.values()]))


def _no_site(a: Recording, b: Recording) -> str:
    one, other = (f"{_name(side)} has {counted(len(side.sites), 'site')}" for side in (a, b))
    return (
        f"cannot compare {_name(a)} with {_name(b)}: "
        f"no site of one could be found in the other ({one}, {other}); "
        "compare two recordings of the same model"
    )


def _no_step(a: Recording, b: Recording) -> str:
    one, other = (f"{_name(side)} has {_some(side.steps)}" for side in (a, b))
    return (
        f"cannot compare {_name(a)} with {_name(b)}: "
        f"no step was measured in both ({one}, {other}); "
        "record both again with --every 1 --budget none"
    )


def _some(steps: Sequence[int] | Ints) -> str:
    if not len(steps):
        return "no measured step"
    if len(steps) == 1:
        return f"step {steps[0]}"
    named = ", ".join(map(str, steps[:NAMED_STEPS]))
    if len(steps) > NAMED_STEPS:
        named += " and others"
    return f"steps {named}"


def _name(recording: Recording) -> str:
    return recording.path.name or "a recording"


def chosen_part(comparison: Comparison, text: str) -> Comparison:
    """Return a comparison with the chosen sites and their modules alone.

    Args:
        comparison: The comparison.
        text: A text of the site language, with the names of either recording; see Note [Words] in
            `kedge.sites.filters`.

    Raises:
        NoSuchSite: A part of the text selects nothing, or all of it only what cannot be compared.
        SelectorError: The text cannot be read.
    """
    either = (*comparison.a.sites, *comparison.b.sites)
    chosen = {id(site) for site in chosen_sites(text, either, "these recordings")}
    whole = comparison.alignment
    places = []
    for place, same in enumerate(whole.sites):
        if not chosen.isdisjoint((id(same.a), id(same.b))):
            places.append(place)
    if not places:
        raise NoSuchSite(
            f'"{text}" selects nothing that both recordings have; "**" selects everything'
        )
    sites = tuple(whole.sites[i] for i in places)
    kept = {id(same.module) for same in sites}
    part = Alignment(
        modules=tuple(same for same in whole.modules if id(same) in kept),
        sites=sites,
        only_a=_with(whole.only_a, chosen),
        only_b=_with(whole.only_b, chosen),
        sites_a=_of(whole.sites_a, chosen),
        sites_b=_of(whole.sites_b, chosen),
    )
    return replace(
        comparison,
        alignment=part,
        apart=comparison.apart[places],
        which=comparison.which[places],
    )


def _with(
    modules: Sequence[RecordedModule],
    chosen: set[int],
) -> tuple[RecordedModule, ...]:
    return tuple(module for module in modules if _of(module.sites, chosen))


def _of(sites: Sequence[SiteInfo], chosen: set[int]) -> tuple[SiteInfo, ...]:
    return tuple(site for site in sites if id(site) in chosen)
