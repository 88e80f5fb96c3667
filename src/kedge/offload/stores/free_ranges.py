"""The free ranges of a file or a block of memory: best fit, and neighbours joined."""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeRanges:
    """The free ranges of a file that only grows.

    Training steps take the same sizes again and again, so the smallest range that is large enough
    mostly has exactly that size, and the file stops growing after the first step.

    Attributes:
        size: The size of the file in bytes.
        used: The bytes of it that are taken.
    """

    def __init__(self) -> None:
        self.size = 0
        self.used = 0
        self._sizes: list[tuple[int, int]] = []  # (size, start), sorted
        self._starts: dict[int, int] = {}  # start -> size
        self._ends: dict[int, int] = {}  # end -> start

    def take(self, size: int) -> int | None:
        """Take a range; returns its start, or None if no free range is large enough."""
        place = bisect_left(self._sizes, (size, 0))
        if place == len(self._sizes):
            return None
        found, start = self._sizes[place]
        self._remove(start)
        if found > size:
            self._insert(start + size, found - size)
        self.used += size
        return start

    def release(self, start: int, size: int) -> None:
        """Release a range that was taken."""
        self.used -= size
        self._join(start, size)

    def grow(self, size: int) -> None:
        """Add bytes at the end."""
        self._join(self.size, size)
        self.size += size

    def missing(self, size: int) -> int:
        """Return the bytes by which the file has to grow, so that its end has room for a range of this size."""
        start = self._ends.get(self.size, self.size)
        return max(0, size - (self.size - start))

    def _join(self, start: int, size: int) -> None:
        if (before := self._ends.get(start)) is not None:
            size += self._remove(before)
            start = before
        if start + size in self._starts:
            size += self._remove(start + size)
        self._insert(start, size)

    def _insert(self, start: int, size: int) -> None:
        insort(self._sizes, (size, start))
        self._starts[start] = size
        self._ends[start + size] = start

    def _remove(self, start: int) -> int:
        size = self._starts.pop(start)
        del self._ends[start + size]
        del self._sizes[bisect_left(self._sizes, (size, start))]
        return size
