"""The timeline of saved tensors: every save and every release in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter

from kedge.store.saved_account import BytesOverStep

MOST_POINTS = 400


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
        """Return the seconds from the first save to some saves and releases, given by their numbers from 1 on."""
        return tuple(round(self._log[number - 1][1] - self._log[0][1], 6) for number in after)

    def alive(self, moment: int | None = None) -> list[int]:
        """Return the numbers of the tensors saved and not released, after so many events; after all if None."""
        held: dict[int, None] = {}
        for event in self.events[:moment]:
            if event >= 0:
                held[event] = None
            else:
                held.pop(~event, None)
        return list(held)


class HeldBytes:
    """The bytes of storages that are held at least once, as their holders come and go.

    Args:
        storages: Returns the storages of a tensor, given its number, and the bytes of each.
    """

    def __init__(self, storages: Callable[[int], Iterable[tuple[int, int]]]) -> None:
        self.storages = storages
        self.bytes = 0
        self._holders: Counter[int] = Counter()

    def apply(self, event: int) -> int:
        """Apply one save or release; returns the bytes held after it."""
        for storage, size in self.storages(event if event >= 0 else ~event):
            before = self._holders[storage]
            self._holders[storage] = before + (1 if event >= 0 else -1)
            if before == 0 and event >= 0:
                self.bytes += size
            elif before == 1 and event < 0:
                self.bytes -= size
        return self.bytes


def course(
    events: Sequence[int],
    storages: Callable[[int], Iterable[tuple[int, int]]],
    holders: Callable[[int], Sequence[tuple[str | None, int]]],
) -> BytesOverStep:
    """Return the bytes held over some events.

    Args:
        events: Saves, and releases as their complement.
        storages: Returns the storages of a tensor that count, each with its bytes.
        holders: Returns the holders after so many events, each with its bytes.
    """
    levels = HeldBytes(storages)
    heights = [levels.apply(event) for event in events]
    if not heights:
        return BytesOverStep()
    peak_at = max(range(len(heights)), key=heights.__getitem__)
    chosen = sorted({*_thinned(heights), peak_at})
    first = next((at for at, event in enumerate(events, 1) if event < 0), None)
    return BytesOverStep(
        bytes=tuple(heights[at] for at in chosen),
        at=tuple(at + 1 for at in chosen),
        peak=heights[peak_at],
        peak_at=peak_at + 1,
        backward=first,
        holders=tuple(holders(peak_at + 1)),
    )


def _thinned(heights: Sequence[int]) -> Iterator[int]:
    """The index of the highest point of each stretch, and both ends."""
    stretch = max(len(heights) * 2 // MOST_POINTS, 1)
    yield 0
    for begin in range(0, len(heights), stretch):
        yield max(range(begin, min(begin + stretch, len(heights))), key=heights.__getitem__)
    yield len(heights) - 1
