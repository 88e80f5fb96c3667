"""Pairs of the same operation in two runs.

# Note [Pairs of operations]
Operations are paired in their order, the surest way first: those that get the same bits and return
the same; between these, those that get the same; last, those of one name in one module. An operation
in place has the name of the other: it makes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from difflib import SequenceMatcher

from kedge.compare.operations.seen import SeenOperation

Key = Callable[[SeenOperation], Hashable]


def _by_name(operation: SeenOperation) -> tuple[Hashable, ...]:
    return operation.event, operation.plain_name, operation.module


def _by_inputs(operation: SeenOperation) -> tuple[Hashable, ...]:
    return *_by_name(operation), operation.taken


def _by_results(operation: SeenOperation) -> tuple[Hashable, ...]:
    return *_by_inputs(operation), operation.made


#: The ways in which operations are paired, see Note [Pairs of operations].
WAYS: tuple[Key, ...] = (_by_results, _by_inputs, _by_name)


def pairs_of(a: Sequence[SeenOperation], b: Sequence[SeenOperation]) -> dict[int, int]:
    """Return the places in B of the operations in A that have a pair."""
    return dict(_paired(a, b, 0, 0, WAYS))


def _paired(
    a: Sequence[SeenOperation],
    b: Sequence[SeenOperation],
    from_a: int,
    from_b: int,
    ways: Sequence[Key],
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of two parts, which begin at some places."""
    if not (a and b and ways):
        return
    way, *others = ways
    keys_a = [way(each) for each in a]
    keys_b = [way(each) for each in b]
    same = 0  # most steps are equal for long: no need to look for the longest part of it
    while same < min(len(a), len(b)) and keys_a[same] == keys_b[same]:
        yield from_a + same, from_b + same
        same += 1

    matcher = SequenceMatcher(None, keys_a[same:], keys_b[same:], autojunk=False)
    end_a = end_b = same
    for at_a, at_b, size in matcher.get_matching_blocks():
        begin_a, begin_b = at_a + same, at_b + same
        yield from _paired(
            a[end_a:begin_a], b[end_b:begin_b], from_a + end_a, from_b + end_b, others
        )
        yield from ((from_a + begin_a + i, from_b + begin_b + i) for i in range(size))
        end_a, end_b = begin_a + size, begin_b + size
