"""Modules of two recordings that are the same by their place, their types and their shapes.

# Note [Structure]
Between two pairs of aligned modules, the others are two short lists in the order of the data. They
are aligned like two texts: by pairs that do not cross and have the largest total weight. A pair
weighs most if types and parameters are the same; names and output shapes decide between such pairs.
Of equal solutions the one with the earliest pairs counts, so that the same two recordings always
have the same alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kedge.compare.alignment.modules import RecordedModule
from kedge.compare.alignment.names import Pair

#: Longer lists are not aligned by structure: time and memory grow with the product of their
#: lengths.
MOST = 3_000

Weights = NDArray[np.int32]
Weigh = Callable[[Sequence[RecordedModule], Sequence[RecordedModule]], Weights]
Gap = tuple[list[RecordedModule], list[RecordedModule]]


def gaps(
    a: Sequence[RecordedModule], b: Sequence[RecordedModule], pairs: Sequence[Pair]
) -> Iterator[Gap]:
    """Yield the modules of both sides that are not in a pair and follow the same pair."""
    anchors = {}
    for number, (one, other) in enumerate(pairs):
        anchors[id(one)] = number
        anchors[id(other)] = number
    others = _after(b, anchors)
    for anchor, left in _after(a, anchors).items():
        if anchor in others:
            yield left, others[anchor]


def _after(
    modules: Sequence[RecordedModule], anchors: dict[int, int]
) -> dict[tuple[int, bool], list[RecordedModule]]:
    """Return modules by the pair that they follow; those that never fire have groups of their own."""
    found: dict[tuple[int, bool], list[RecordedModule]] = {}
    anchor = -1
    for module in modules:
        if id(module) in anchors:
            anchor = anchors[id(module)]
        else:
            found.setdefault((anchor, module.fires), []).append(module)
    return found


def aligned(gap: Gap, weigh: Weigh) -> Iterator[Pair]:
    """Yield pairs of the modules of a gap; see Note [Structure]."""
    a, b = gap
    if max(len(a), len(b)) > MOST:
        return
    weights = weigh(a, b)
    best = _best(weights)
    i = j = 0
    while i < len(a) and j < len(b):
        if weights[i, j] and best[i, j] == weights[i, j] + best[i + 1, j + 1]:
            yield a[i], b[j]
            i += 1
            j += 1
        elif best[i, j] == best[i, j + 1]:
            j += 1
        else:
            i += 1


def _best(weights: Weights) -> Weights:
    """Return the largest total weight of pairs from each place on."""
    rows, columns = weights.shape
    best = np.zeros((rows + 1, columns + 1), dtype=np.int32)
    for i in range(rows - 1, -1, -1):
        either = np.maximum(best[i + 1, :-1], best[i + 1, 1:] + weights[i])
        best[i, :-1] = np.maximum.accumulate(either[::-1])[::-1]
    return best


def alike(a: Sequence[RecordedModule], b: Sequence[RecordedModule]) -> Weights:
    """Return the weights of pairs of the same type with the same parameters."""
    same = _equal(a, b, lambda m: (m.type, m.parameters, m.leaf))
    named = _equal(a, b, _name)
    sized = _equal(a, b, lambda m: m.size)
    return np.asarray(same * (8 + 4 * named + 2 * sized))


def changed(a: Sequence[RecordedModule], b: Sequence[RecordedModule]) -> Weights:
    """Return the weights of pairs of the same name, or of the same type with other parameters."""
    level = _equal(a, b, lambda m: m.leaf)
    named = _equal(a, b, lambda m: m.segments[-1:])
    typed = _equal(a, b, lambda m: m.type)
    sized = _equal(a, b, lambda m: m.size)
    alone = np.int32(len(a) == len(b) == 1 and len(a[0].size) > 0) * sized
    return np.asarray(level * (named | typed | alone) * (4 + 4 * named + 2 * typed + sized))


def _name(module: RecordedModule) -> object:
    """Return the last part of a path; a number or an empty path equals only itself."""
    last = module.segments[-1:]
    if not last or last[0].isdecimal():
        return id(module)
    return last


def _equal(
    a: Sequence[RecordedModule],
    b: Sequence[RecordedModule],
    key: Callable[[RecordedModule], object],
) -> Weights:
    """Return 1 for pairs with the same key, and 0 for the others."""
    numbers: dict[object, int] = {}
    ones = [numbers.setdefault(key(m), len(numbers)) for m in a]
    others = [numbers.setdefault(key(m), len(numbers)) for m in b]
    return np.asarray(np.equal.outer(np.array(ones), np.array(others)), dtype=np.int32)
