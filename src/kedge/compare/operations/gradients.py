"""The first operation of a forward after which gradients have another way in two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.compare.operations.departure import StepOfRun, TwoSteps
from kedge.compare.operations.seen import SeenOperation, SeenValue

#: Nodes of a reshaping: which one it is depends on the strides, not on the values.
RESHAPING = frozenset(
    {"ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0", "CloneBackward0"}
)


@dataclass(frozen=True)
class PartingNode:
    """A value that is equal in both runs, and has another node in the autograd graph.

    Attributes:
        operation: The operation of A that makes it, or that gets it.
        a: The place of the operation that makes it in A.
        b: That in B.
        node_a: The name of its node in A.
        node_b: That in B.
    """

    operation: SeenOperation
    a: tuple[int, ...]
    b: tuple[int, ...]
    node_a: str
    node_b: str


def parting_node(two: TwoSteps, a: int, b: int) -> PartingNode | None:
    """Return the first value on the way to a loss that has another node; None without one.

    Args:
        two: The steps, with equal losses.
        a: The place of the loss in A.
        b: That in B.
    """
    for place in sorted({*_behind(two.a, a), a}):
        there = b if place == a else two.pairs.get(place)
        if there is None:
            continue
        one, other = two.a.operations[place], two.b.operations[there]
        got = _unlike(one.inputs, other.inputs)
        if got is not None:
            mine, theirs = got
            maker, other_maker = two.a.maker(mine.digest, place), two.b.maker(theirs.digest, there)
            shown = one if maker is None else two.a.operations[maker]
            if other_maker is not None and other_maker not in two.backwards:
                shown = two.b.operations[other_maker]
            return PartingNode(shown, _known(maker), _known(other_maker), mine.node, theirs.node)
        made = _unlike(one.outputs, other.outputs)
        if made is not None:
            return PartingNode(one, (place,), (there,), made[0].node, made[1].node)
    return None


def _known(place: int | None) -> tuple[int, ...]:
    return () if place is None else (place,)


def _unlike(a: Sequence[SeenValue], b: Sequence[SeenValue]) -> tuple[SeenValue, SeenValue] | None:
    """Return the first two values of which one has another node."""
    for mine, theirs in zip(a, b, strict=False):
        if mine.node != theirs.node and not RESHAPING.issuperset((mine.node, theirs.node)):
            return mine, theirs
    return None


def _behind(step: StepOfRun, place: int) -> set[int]:
    """Return the places of all operations that lead to a boundary."""
    found: set[int] = set()
    open_ends = [place]
    while open_ends:
        before = open_ends.pop()
        for digest in step.operations[before].taken:
            maker = step.maker(digest, before)
            if maker is not None and maker not in found:
                found.add(maker)
                open_ends.append(maker)
    return found
