"""Following saves and releases."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kedge.offload.account.over_step import MOST_POINTS, SaveTimeline, over_step
from kedge.store.held_tensors import TensorKind
from kedge.store.saved_account import BytesOverStep


def followed(events: list[int], storages: dict[int, list[tuple[int, int]]]) -> BytesOverStep:
    """Return what is held over some events."""
    timeline = SaveTimeline()
    for event in events:
        if event >= 0:
            timeline.saved(event)
        else:
            timeline.released(~event)
    return over_step(timeline, storages.__getitem__, lambda _: TensorKind("all"))


def test_a_storage_counts_as_long_as_one_holds_it() -> None:
    """Two tensors in one storage hold its bytes once, until both are released."""
    line = followed([0, 1, 2, ~0, ~1, ~2], {0: [(0, 10)], 1: [(0, 10)], 2: [(1, 5)]})

    assert line.bytes == (10, 10, 15, 15, 5, 0)
    assert (line.peak, line.peak_at, line.backward) == (15, 3, 4)
    assert line.holders == (("all", 15),)


def test_nothing_saved_is_an_empty_line() -> None:
    """Without events there is no peak."""
    assert followed([], {}) == BytesOverStep()


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=3000))
def test_a_long_line_is_thinned_and_keeps_its_peak(sizes: list[int]) -> None:
    """However many saves there are, the line has few points, its ends, its peak, and each point is what was held."""
    numbers = list(range(len(sizes)))
    events = [*numbers, *(~n for n in reversed(numbers))]
    line = followed(events, {n: [(n, size)] for n, size in zip(numbers, sizes, strict=True)})
    sums = [0]
    for event in events:
        sums.append(sums[-1] + (sizes[event] if event >= 0 else -sizes[~event]))

    assert len(line.bytes) <= MOST_POINTS + 3
    assert line.peak == sum(sizes) == max(line.bytes)
    assert line.at[0] == 1
    assert line.at[-1] == len(events)
    assert [sums[at] for at in line.at] == list(line.bytes)


def test_what_is_alive_is_known_for_every_moment() -> None:
    """A tensor is alive from its save to its release, in the order of the saves."""
    line = SaveTimeline()
    line.saved(0)
    line.saved(1)
    line.released(0)

    assert (line.alive(0), line.alive(2), line.alive()) == ([], [0, 1], [1])
    assert len(line) == 3
