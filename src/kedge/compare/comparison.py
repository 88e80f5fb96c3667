"""Two recordings, compared at every site and in every step that both have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kedge.compare.alignment.sites import Alignment, SameModule, SameSite, align
from kedge.compare.measures import COMPARED, COUNTS, ChosenRows, Compared, apart, eps
from kedge.errors import CannotCompare
from kedge.short_text import counted
from kedge.store.recording import Recording
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
        sizes = [
            size for size in (eps(self.same.a.dtype), eps(self.same.b.dtype)) if size is not None
        ]
        return self.apart / max(sizes) if sizes and self.statistic not in COUNTS else None


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
        return int(
            np.isin(self.steps, np.setxor1d(self.a.steps, self.b.steps, assume_unique=True)).sum()
        )

    @cached_property
    def first(self) -> Parting | None:
        """The first difference: in the first step with one, at the first site in the order of the data."""
        columns = np.flatnonzero(self.parted.any(axis=0))
        return (
            self.parting(int(np.argmax(self.parted[:, columns[0]])), int(columns[0]))
            if len(columns)
            else None
        )

    def parting(self, site: int, step: int) -> Parting:
        """Return the difference of two sites in one step, by their places in the matrices."""
        same, statistic = self.alignment.sites[site], COMPARED[self.which[site, step]]
        a, b = (self.value(site, step, statistic, side) for side in ("a", "b"))
        return Parting(int(self.steps[step]), same, statistic, a, b, float(self.apart[site, step]))

    def value(self, site: int, step: int, statistic: Compared, side: str) -> float:
        """Return one statistic of a site in one step of one of the recordings."""
        rows = (self.a if side == "a" else self.b).rows(getattr(self.alignment.sites[site], side))
        return float(rows.statistic(statistic)[np.searchsorted(rows.step, self.steps[step])])

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
        where = slice(None) if len(found) == len(steps) else np.searchsorted(steps, found)
        one, other = ChosenRows(a.rows(same.a), here), ChosenRows(b.rows(same.b), there)
        for number, (_, distance) in enumerate(apart(one, other)):
            more = distance > far[i, where]
            which[i, where] = np.where(more, number, which[i, where])
            far[i, where] = np.fmax(far[i, where], distance)
    far[far == NOT_MEASURED] = np.nan
    measured = ~np.isnan(far).all(axis=0)
    return Comparison(
        a, b, alignment, steps[measured], tolerance, far[:, measured], which[:, measured]
    )


Indices = Ints | slice


def _common(a: Rows, b: Rows, kind: str) -> tuple[Ints, Indices, Indices]:
    """Return the steps in which both have the same kind of value, and their places in either.

    Between measured steps a parameter's gradient is recorded only if one is not finite: it is
    compared with others of its kind alone. An update has some of the elements: other numbers of
    them mean other elements.
    """
    telling = {"param.grad": "level", "update": "count"}.get(kind)
    if np.array_equal(a.step, b.step) and (
        telling is None or np.array_equal(getattr(a, telling), getattr(b, telling))
    ):
        return a.step, slice(None), slice(None)
    common, here, there = np.intersect1d(a.step, b.step, assume_unique=True, return_indices=True)
    if telling is not None:
        same = getattr(a, telling)[here] == getattr(b, telling)[there]
        common, here, there = common[same], here[same], there[same]
    return common, here, there


def _union(steps: Iterator[Ints]) -> Ints:
    """Return all steps of several sites, most of which have the same ones."""
    distinct: dict[tuple[int, ...], list[Ints]] = {}
    for found in steps:
        if len(found):
            known = distinct.setdefault((len(found), int(found[0]), int(found[-1])), [])
            if not any(np.array_equal(found, other) for other in known):
                known.append(found)
    everything = [found for known in distinct.values() for found in known]
    return np.unique(np.concatenate(everything)) if everything else np.zeros(0, dtype=np.int64)


def _no_site(a: Recording, b: Recording) -> str:
    held = ", ".join(f"{_name(side)} has {counted(len(side.sites), 'site')}" for side in (a, b))
    return (
        f"cannot compare {_name(a)} with {_name(b)}: no site of one could be found in the other ({held}); "
        "compare two recordings of the same model"
    )


def _no_step(a: Recording, b: Recording) -> str:
    held = ", ".join(f"{_name(side)} has {_some(side.steps)}" for side in (a, b))
    return (
        f"cannot compare {_name(a)} with {_name(b)}: no step was measured in both ({held}); "
        "record both again with --every 1 --budget none"
    )


def _some(steps: Sequence[int] | Ints) -> str:
    if not len(steps):
        return "no measured step"
    named = ", ".join(str(step) for step in steps[:NAMED_STEPS])
    return f"step{'' if len(steps) == 1 else 's'} {named}{' and others' if len(steps) > NAMED_STEPS else ''}"


def _name(recording: Recording) -> str:
    return recording.path.name or "a recording"
