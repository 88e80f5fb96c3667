"""The free ranges of a block of pinned memory."""

from __future__ import annotations

import random

from kedge.offload.stores.pinned import FreeRanges


def test_ranges_never_overlap_and_all_room_comes_back():
    """Whatever is taken and released in whatever order, no byte has two owners, and in the end one free range is left."""
    rng = random.Random(1)
    free, taken, refused = FreeRanges(2000), [], 0
    for _ in range(3000):
        if taken and rng.random() < 0.5:
            free.release(*taken.pop(rng.randrange(len(taken))))
            continue
        size = rng.randrange(1, 100)
        start = free.take(size)
        if start is None:
            refused += 1
            continue
        assert start + size <= 2000
        assert all(start + size <= other or other + length <= start for other, length in taken)
        taken.append((start, size))
        assert free.used == sum(length for _, length in taken)
    for piece in taken:
        free.release(*piece)

    assert refused > 0
    assert free.used == 0
    assert free.take(2000) == 0


def test_the_smallest_range_that_is_large_enough_is_taken():
    """A large hole is not cut up while a smaller one will do."""
    free = FreeRanges(100)
    pieces = [(free.take(size), size) for size in (40, 5, 10, 5, 40)]
    for start, size in (pieces[0], pieces[2]):
        free.release(start, size)

    assert free.take(9) == pieces[2][0]
    assert free.take(11) == pieces[0][0]
