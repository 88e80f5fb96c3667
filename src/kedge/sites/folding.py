"""Folding: names that differ only in the numbers of blocks stand as one, such as ``h.0-47.attn.c_attn``.

# Note [What folds]
Two things fold if their names are equal but for whole segments that are numbers, and they are
alike: of one type and shape, say. Numbers in several places fold together where every combination
is there, as in ``layers.0-31.experts.0-7.w1``. A member that differs, because it has a finding or
is an outlier, stands alone right after the others: ``h.0-16,18-47.mlp`` and ``h.17.mlp``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

#: Lists of at most this many lines are shown whole.
WHOLE = 40
#: The most numbers, or runs of numbers, that a name lists.
MOST_RUNS = 4
#: An outlier is so many times as far from the median as the median distance, and farther than the
#: least distance.
OUTLYING = 5.0
#: The least distance of an outlier on a logarithmic scale: four times as much, or a quarter.
LEAST_FACTOR = 4.0
#: The least distance of an outlier among shares.
LEAST_SHARE = 0.25
#: More than so many, and than this share of a group, are no outliers.
FEW_OUTLIERS = 3
MOST_OUTLIERS = 1 / 8

_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9]\d*)(?![^.])")

T = TypeVar("T")
Numbers = tuple[int, ...]
Pattern = tuple[str, ...]


@dataclass(frozen=True)
class Fold(Generic[T]):
    """Things whose names differ only in numbers, or one thing by itself.

    Attributes:
        name: The name of all: that of the only one, or one with the ranges of their numbers.
        members: The things, in their order.
    """

    name: str
    members: tuple[T, ...]

    @property
    def folded(self) -> bool:
        """Whether it stands for several."""
        return len(self.members) > 1


@dataclass(frozen=True)
class Folding(Generic[T]):
    """What folds; see Note [What folds].

    Attributes:
        name: Returns a thing's name.
        like: Returns what must be equal in things that fold, such as the type and the shape.
        state: Returns what must be equal too; things that differ in it alone stand next to each
            other.
        differing: Returns the places of those of a group that must stand alone.
    """

    name: Callable[[T], str]
    like: Callable[[T], Hashable]
    state: Callable[[T], Hashable] = lambda _: None
    differing: Callable[[Sequence[T]], Collection[int]] = lambda _: ()

    def fold(self, items: Iterable[T]) -> list[Fold[T]]:
        """Return things as folds, in the order of their first members.

        One that stands alone comes after its group.
        """
        groups: dict[tuple[Pattern, Hashable], dict[Hashable, list[T]]] = {}
        places: dict[int, int] = {}
        for place, item in enumerate(items):
            group = groups.setdefault((pattern(self.name(item)), self.like(item)), {})
            group.setdefault(self.state(item), []).append(item)
            places[id(item)] = place
        made: list[tuple[int, bool, int, Fold[T]]] = []
        for (around, _), group in groups.items():
            first = min(places[id(members[0])] for members in group.values())
            for members in group.values():
                for one in self._folds(around, members):
                    place = places[id(one.members[0])]
                    made.append((first, not one.folded, place, one))
        made.sort(key=lambda entry: entry[:3])
        return [one for *_, one in made]

    def shown(self, items: Sequence[T]) -> list[Fold[T]]:
        """Return a list as folds if it is long, and otherwise each thing by itself."""
        if len(items) > WHOLE:
            return self.fold(items)
        return self.each(items)

    def each(self, items: Iterable[T]) -> list[Fold[T]]:
        """Return each thing by itself."""
        return [Fold(self.name(item), (item,)) for item in items]

    def _folds(self, around: Pattern, items: Sequence[T]) -> list[Fold[T]]:
        """Return the folds of things that are alike and have one pattern."""
        alone: set[int] = set()
        if len(items) > 1:
            alone.update(self.differing(items))
        found: dict[Numbers, T] = {}
        single = []
        for place, item in enumerate(items):
            _, numbers = _split(self.name(item))
            if place in alone or numbers in found:
                single.append(item)
            else:
                found[numbers] = item

        boxes = _boxes(found)
        box_of: dict[Numbers, int] = {}
        for at, box in enumerate(boxes):
            box_of.update(dict.fromkeys(product(*box), at))
        within: list[list[T]] = [[] for _ in boxes]
        for numbers, item in found.items():
            within[box_of[numbers]].append(item)

        folds = []
        for box, members in zip(boxes, within, strict=True):
            name = _named(around, box)
            if len(members) == 1:
                name = self.name(members[0])
            folds.append(Fold(name, tuple(members)))
        return folds + self.each(single)


def folded_names(texts: Iterable[str]) -> list[str]:
    """Return names with those folded that differ only in numbers."""
    folds = Folding(_Name.__str__, _Name.kind).fold(map(_Name, texts))
    return [one.name for one in folds]


def pattern(name: str) -> Pattern:
    """Return the parts of a name around the numbers of blocks."""
    return _split(name)[0]


def block(path: str) -> str:
    """Return the innermost numbered block that a path is in, such as ``h.0`` for ``h.0.attn``.

    The path if in none.
    """
    found = list(_NUMBER.finditer(_head(path)))
    if not found:
        return path
    return path[: found[-1].end()]


def outliers(
    values: Sequence[float | None] | NDArray[np.float64], *, share: bool = False
) -> list[int]:
    """Return the places of values that are far from the others of a group, the farthest first.

    Args:
        values: Sizes; None, zeros and non-finite ones are left out.
        share: Whether they are shares between 0 and 1; otherwise they are compared on a logarithmic
            scale.
    """
    given = np.array(values, dtype=np.float64)  # None becomes NaN
    places = np.flatnonzero(np.isfinite(given) & (share | (given > 0)))
    if len(places) < 3:
        return []
    known = given[places]
    least = LEAST_SHARE
    if not share:
        known = np.log(known)
        least = math.log(LEAST_FACTOR)
    apart = np.abs(known - np.median(known))
    least = max(OUTLYING * float(np.median(apart)), least)
    far = np.flatnonzero(apart > least)
    if len(far) > max(FEW_OUTLIERS, len(known) * MOST_OUTLIERS):
        return []  # the group has two halves
    return [int(place) for place in places[far[np.argsort(-apart[far], kind="stable")]]]


@dataclass(frozen=True, eq=False)
class _Name:
    text: str

    def __str__(self) -> str:
        return self.text

    def kind(self) -> None:
        """All names are alike."""


def _head(name: str) -> str:
    """Return the path of a name, without what follows its module."""
    return re.split(r"[\[#:/]", name, maxsplit=1)[0]


def _split(name: str) -> tuple[Pattern, Numbers]:
    head = _head(name)
    *parts, last = _NUMBER.split(head)
    return (*parts, last + name[len(head) :]), tuple(map(int, _NUMBER.findall(head)))


Box = tuple[Numbers, ...]


def _boxes(found: Collection[Numbers]) -> list[Box]:
    """Return the numbers as products of sets, one set for each place of a number."""
    tails: dict[int, dict[Numbers, None]] = {}
    for numbers in found:
        if not numbers:
            return [()]
        tails.setdefault(numbers[0], {})[numbers[1:]] = None
    merged: dict[tuple[Box, ...], list[int]] = {}
    for number, tail in tails.items():
        merged.setdefault(tuple(_boxes(tail)), []).append(number)
    boxes: list[Box] = []
    for rests, firsts in merged.items():
        first = tuple(sorted(firsts))
        boxes += [(first, *rest) for rest in rests]
    return boxes


def _named(around: Pattern, box: Box) -> str:
    name = around[0]
    for numbers, part in zip(box, around[1:], strict=True):
        name += ranges(numbers) + part
    return name


def ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers as ranges: ``0-16,18-47``, ``0,2,…,98``."""
    steps = {later - number for number, later in pairwise(numbers)}
    if len(numbers) > MOST_RUNS and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]},{numbers[1]},…,{numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = []
    for run in runs:
        text = str(run[0])
        if len(run) > 1:
            text += f"-{run[-1]}"
        texts.append(text)
    if len(texts) > MOST_RUNS:
        texts = [*texts[: MOST_RUNS - 2], "…", texts[-1]]
    return ",".join(texts)
