"""The spans of the tensors that autograd holds: from the saves and releases of a step to what is held at its moments."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from kedge.store.held_tensors import HeldSpan, HeldTensors, TensorKind, limited

Storages = Callable[[int], Iterable[tuple[int, int]]]


def held_spans(
    events: Sequence[int],
    storages: Storages,
    kind: Callable[[int], TensorKind],
    moments: Sequence[int],
) -> HeldTensors:
    """Return the tensors held at some moments; see Note [Who bears a storage].

    Args:
        events: Saves, and releases as their complement.
        storages: Returns the storages of a tensor that count, each with its bytes.
        kind: Returns the kind of a tensor.
        moments: The moments: numbers of events, rising. Tensors that are held only between two of
            them are left out.
    """
    kinds: dict[TensorKind, int] = {}
    sums: dict[tuple[int, int, int], tuple[int, int]] = {}
    for number, size, since, until in sorted(_borne(events, storages)):
        begin, end = bisect_left(moments, since), bisect_left(moments, until)
        if begin < end:
            key = kinds.setdefault(kind(number), len(kinds)), begin, end
            many, total = sums.get(key, (0, 0))
            sums[key] = many + 1, total + size
    spans = tuple(HeldSpan(at, *both, begin, end) for (at, begin, end), both in sums.items())
    return limited(HeldTensors(tuple(kinds), spans), len(moments))


def _borne(events: Sequence[int], storages: Storages) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each storage who bears it: the tensor, the bytes, and the events from which on it does and does not."""
    holders: dict[int, dict[int, int]] = {}
    since: dict[int, int] = {}
    for at, event in enumerate(events, 1):
        for storage, size in storages(event if event >= 0 else ~event):
            held = holders.setdefault(storage, {})
            before = next(iter(held), None)
            if event >= 0:
                held[event] = size
            else:
                held.pop(~event, None)
            after = next(iter(held), None)
            if before != after:
                if before is not None:
                    yield before, size, since[storage], at
                since[storage] = at
    for storage, held in holders.items():
        for bearer, size in list(held.items())[:1]:
            yield bearer, size, since[storage], len(events) + 1
