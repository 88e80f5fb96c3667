"""The saved tensors over a step: every save and every release in their order, and what is held at its moments."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

from kedge.store.held_tensors import HeldSpan, HeldTensors, TensorKind, limited
from kedge.store.saved_account import BytesOverStep

MOST_POINTS = 400
MOST_HOLDERS = 20

Storages = Callable[[int], Iterable[tuple[int, int]]]


class SaveTimeline:
    """Saves and releases of numbered tensors in the order in which they happened.

    A release may come from any thread, and from the garbage collector; recording one only appends
    to a list.
    """

    def __init__(self) -> None:
        self._log: list[tuple[int, float]] = []

    @property
    def events(self) -> list[int]:
        """Saves, and releases as their complement."""
        return [event for event, _ in self._log[:]]

    def saved(self, number: int) -> None:
        """Record the save of a tensor."""
        self._log.append((number, perf_counter()))

    def released(self, number: int) -> None:
        """Record that autograd has released a tensor."""
        self._log.append((~number, perf_counter()))

    def __len__(self) -> int:
        """The number of saves and releases."""
        return len(self._log)

    def seconds(self, after: Iterable[int]) -> tuple[float, ...]:
        """Return the seconds from the first save to some saves and releases.

        These are given by their numbers, from 1 on.
        """
        _, begun = self._log[0]
        return tuple(round(self._log[number - 1][1] - begun, 6) for number in after)

    def alive(self, moment: int | None = None) -> list[int]:
        """Return the numbers of the tensors saved and not released.

        Args:
            moment: The number of events that have happened; None for all.
        """
        held: dict[int, None] = {}
        for event in self.events[:moment]:
            if event >= 0:
                held[event] = None
            else:
                held.pop(~event, None)
        return list(held)


class BorneStorage(NamedTuple):
    """A storage, as long as one tensor bears it; see Note [Who bears a storage] in `kedge.store.held_tensors`.

    Attributes:
        bearer: The number of the tensor.
        bytes: The bytes of the storage.
        since: The number of the save or release after which the tensor bears it.
        until: The number of the one after which it does not.
    """

    bearer: int
    bytes: int
    since: int
    until: int


def over_step(
    timeline: SaveTimeline, storages: Storages, kind: Callable[[int], TensorKind]
) -> BytesOverStep:
    """Return what is held over the saves and releases of a step.

    Args:
        timeline: The saves and releases.
        storages: Returns the storages of a tensor that count, each with its bytes.
        kind: Returns the kind of a tensor.
    """
    events = timeline.events
    if not events:
        return BytesOverStep()

    borne = sorted(_borne(events, storages))
    changes = [0] * (len(events) + 2)
    for each in borne:
        changes[each.since] += each.bytes
        changes[each.until] -= each.bytes
    heights = list(accumulate(changes[1:-1]))

    peak_at = 1 + max(range(len(heights)), key=heights.__getitem__)
    holders: Counter[str | None] = Counter()
    for each in borne:
        if each.since <= peak_at < each.until:
            holders[kind(each.bearer).path] += each.bytes

    moments = tuple(sorted({*_thinned(heights), peak_at}))
    releases = (at for at, event in enumerate(events, 1) if event < 0)
    return BytesOverStep(
        bytes=tuple(heights[moment - 1] for moment in moments),
        at=moments,
        peak=heights[peak_at - 1],
        peak_at=peak_at,
        backward=next(releases, None),
        holders=tuple(holders.most_common(MOST_HOLDERS)),
        seconds=timeline.seconds(moments),
        tensors=_spans(borne, kind, moments),
    )


def _borne(events: Sequence[int], storages: Storages) -> Iterator[BorneStorage]:
    holders: dict[int, dict[int, int]] = {}
    since: dict[int, int] = {}
    for at, event in enumerate(events, 1):
        is_saved = event >= 0
        number = event if is_saved else ~event
        for storage, size in storages(number):
            held = holders.setdefault(storage, {})
            before = next(iter(held), None)
            if is_saved:
                held[number] = size
            else:
                held.pop(number, None)

            after = next(iter(held), None)
            if before != after:
                if before is not None:
                    yield BorneStorage(before, size, since[storage], at)
                since[storage] = at

    for storage, held in holders.items():
        if held:
            bearer, size = next(iter(held.items()))
            yield BorneStorage(bearer, size, since[storage], len(events) + 1)


def _thinned(heights: Sequence[int]) -> Iterator[int]:
    """Yield the moment of the highest point of each stretch, and both ends."""
    stretch = max(len(heights) * 2 // MOST_POINTS, 1)
    yield 1
    for begin in range(0, len(heights), stretch):
        places = range(begin, min(begin + stretch, len(heights)))
        yield 1 + max(places, key=heights.__getitem__)
    yield len(heights)


def _spans(
    borne: Iterable[BorneStorage],
    kind: Callable[[int], TensorKind],
    moments: Sequence[int],
) -> HeldTensors:
    """Return the tensors held at some moments; those held only between two of them are left out."""
    kinds: dict[TensorKind, int] = {}
    sums: dict[tuple[int, int, int], tuple[int, int]] = {}
    for each in borne:
        begin = bisect_left(moments, each.since)
        end = bisect_left(moments, each.until)
        if begin < end:
            number = kinds.setdefault(kind(each.bearer), len(kinds))
            many, total = sums.get((number, begin, end), (0, 0))
            sums[number, begin, end] = many + 1, total + each.bytes

    spans = [
        HeldSpan(number, many, total, begin, end)
        for (number, begin, end), (many, total) in sums.items()
    ]
    return limited(HeldTensors(tuple(kinds), tuple(spans)), len(moments))
