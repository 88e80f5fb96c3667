"""The operation from which a value of two runs differs.

# Note [The operation that departs]
From a value that differs the way leads back, in either run, to the operation that made it and to what
that one got, for as long as the other run has no such bits anywhere in the step. It ends at an
operation that gets only what the other run has too, and returns what that one has not: it departs. So
nothing is said of operations whose inputs differ, or of those that do not lead to the value, such as
a metric. If the way ends at no operation, what differs came from outside of those that were seen:
from the data, from a parameter, from code that PyTorch does not call.

An operation that draws random numbers also gets the state of the generators.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from kedge.compare.operations.pairs import pairs_of
from kedge.compare.operations.seen import SeenOperation


class StepOfRun:
    """The operations of one run, and the bits that were there.

    Attributes:
        operations: The operations and boundaries.
        digests: The digests of all values in the step, and of states from which it has drawn.
    """

    def __init__(self, operations: Sequence[SeenOperation]) -> None:
        self.operations = operations
        self.digests = {digest for each in operations for digest in (*each.taken, *each.made)}
        self._makers: dict[str, list[int]] = {}
        for place, each in enumerate(operations):
            for digest in each.made:
                self._makers.setdefault(digest, []).append(place)

    def maker(self, digest: str, before: int) -> int | None:
        """Return the last operation before a place that returned some bits; None without one."""
        places = self._makers.get(digest, [])
        earlier = bisect_left(places, before)
        if not earlier:
            return None
        return places[earlier - 1]


@dataclass(frozen=True)
class Ways:
    """Where the ways back from a value have ended in one run.

    Attributes:
        departing: The first operation that departs; None without one.
        drawing: The first one that would, but for the random numbers that it has drawn.
        entering: The first one that takes other numbers from outside of PyTorch.
    """

    departing: int | None
    drawing: int | None
    entering: int | None


class TwoSteps:
    """The same step of two runs.

    Attributes:
        a: The step of A.
        b: That of B.
    """

    def __init__(self, a: Sequence[SeenOperation], b: Sequence[SeenOperation]) -> None:
        self.a = StepOfRun(a)
        self.b = StepOfRun(b)

    @cached_property
    def pairs(self) -> dict[int, int]:
        """The places in B of A's operations that have a pair."""
        return pairs_of(self.a.operations, self.b.operations)

    @cached_property
    def backwards(self) -> dict[int, int]:
        """The places in A of B's operations that have a pair."""
        return {b: a for a, b in self.pairs.items()}

    def boundaries(self, event: str, a: str, b: str) -> Iterator[tuple[int, int]]:
        """Yield the places of the same boundary in both, such as each call of a module.

        Args:
            event: The kind of boundary.
            a: The path of the module in A.
            b: That in B.
        """
        places = []
        for step, path in ((self.a, a), (self.b, b)):
            found = [
                place
                for place, each in enumerate(step.operations)
                if each.event == event and each.module == path
            ]
            places.append(found)
        return zip(*places, strict=False)

    def differ(self, a: int, b: int) -> bool:
        """Whether the tensors at two boundaries differ."""
        return self.a.operations[a].taken != self.b.operations[b].taken

    def ways_a(self, place: int) -> Ways:
        """Return where the ways from a boundary of A end."""
        return _ways(self.a, place, self.b.digests)

    def ways_b(self, place: int) -> Ways:
        """Return where the ways from a boundary of B end."""
        return _ways(self.b, place, self.a.digests)


@dataclass(frozen=True)
class DepartingOperations:
    """The operations that depart, of which one run may have none.

    Attributes:
        a: The place of A's first one; None without one.
        b: That of B's.
        is_pair: Whether they are the same operation.
    """

    a: int | None
    b: int | None
    is_pair: bool


def departure(two: TwoSteps, a: int, b: int) -> DepartingOperations | None:
    """Return the operations from which the tensors at a boundary differ; None if none departs.

    Args:
        two: The steps.
        a: The place of the boundary in A.
        b: That in B.
    """
    here, there = two.ways_a(a).departing, two.ways_b(b).departing
    if (here is not None and here not in two.pairs) or (
        there is not None and there not in two.backwards
    ):
        return DepartingOperations(here, there, is_pair=False)
    if here is not None:
        return _made_earlier(two, here, two.pairs[here])
    if there is not None:
        return _made_earlier(two, two.backwards[there], there)
    return None


def _made_earlier(two: TwoSteps, a: int, b: int) -> DepartingOperations:
    """Return a pair that departs, or the one before it that makes what one of its two gets.

    Bits that an operation has made may be somewhere in the other run by chance, as those of a mask.
    """
    one, other = two.a.operations[a], two.b.operations[b]
    for mine, theirs in zip(one.taken, other.taken, strict=False):
        if mine == theirs:
            continue
        maker, other_maker = two.a.maker(mine, a), two.b.maker(theirs, b)
        if maker is None or other_maker is None or two.pairs.get(maker) != other_maker:
            continue
        if two.a.operations[maker].taken == two.b.operations[other_maker].taken:
            return DepartingOperations(maker, other_maker, is_pair=True)
    return DepartingOperations(a, b, is_pair=True)


def _ways(step: StepOfRun, place: int, others: set[str]) -> Ways:
    """Follow the ways back from what a boundary gets."""
    departing: list[int] = []
    drawing: list[int] = []
    entering: list[int] = []
    seen: set[int] = set()
    open_ends = [(digest, place) for digest in step.operations[place].taken]
    while open_ends:
        digest, before = open_ends.pop()
        if digest in others:
            continue
        maker = step.maker(digest, before)
        if maker is None or maker in seen:
            continue
        seen.add(maker)
        operation = step.operations[maker]
        unlike = [each for each in operation.taken if each not in others]
        if not unlike and operation.enters:
            entering.append(maker)
        elif not unlike:
            departing.append(maker)
        elif unlike == [operation.random]:
            drawing.append(maker)
        open_ends += [(each, maker) for each in unlike]
    return Ways(*(min(found, default=None) for found in (departing, drawing, entering)))
