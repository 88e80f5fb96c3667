"""Graph folding: the choice of module calls drawn as one box, and of calls that are opened.

# Note [Opened modules]
A call is opened only if the calls around it are open, and if it made more than one operation.
Without a depth, calls are opened level by level, as long as the drawing stays within a number of
boxes. If the first level alone exceeds that number, consecutive boxes in the order of execution are
joined: data flows in that order, so joining adds no cycle to the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from kedge.inspection.autograd_graph import GraphHook, GraphNode

Call = tuple[str | None, int]
Calls = tuple[Call, ...]


@dataclass(frozen=True)
class Box:
    """One box of the drawing.

    Attributes:
        calls: The opened module calls around the box.
        nodes: The nodes in the box, in the order of execution.
        of: The call that the box represents; None for a single node, or for consecutive nodes.
    """

    calls: Calls
    nodes: tuple[GraphNode, ...]
    of: Call | None = None

    @property
    def operations(self) -> tuple[GraphNode, ...]:
        """The nodes that are not leaves."""
        return tuple(node for node in self.nodes if node.kind == "operation")

    @property
    def bytes(self) -> int:
        """The bytes that its nodes hold for backward."""
        return sum(node.bytes for node in self.nodes)

    @property
    def hooks(self) -> tuple[GraphHook, ...]:
        """The hooks on its nodes."""
        hooks: list[GraphHook] = []
        for node in self.nodes:
            hooks += node.hooks
        return tuple(hooks)


@dataclass(frozen=True)
class FoldedGraph:
    """A graph as it is drawn.

    Attributes:
        boxes: The boxes.
        edges: The flow of data between boxes: pairs of indices into `boxes`, from and to.
    """

    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int], ...]


def fold(
    nodes: Sequence[GraphNode], depth: int | None, most: int, opened: Collection[str] = ()
) -> FoldedGraph:
    """Return the boxes and edges to draw; see Note [Opened modules].

    Args:
        nodes: The nodes, with the calls that they belong to.
        depth: The number of nested calls to open; None for as many as keep within `most`.
        most: The largest number of boxes if `depth` is None.
        opened: Paths of further modules to open, together with the modules around them.
    """
    if depth is not None:
        boxes = _boxes(nodes, _opened(nodes, depth, opened))
    else:
        boxes = _boxes(nodes, _opened(nodes, _deepest(nodes, most), opened))
        if not opened and len(boxes) > most:
            boxes = _together(boxes, most)
    return FoldedGraph(tuple(boxes), tuple(_edges(boxes)))


def _deepest(nodes: Sequence[GraphNode], most: int) -> int:
    levels = max((len(node.calls) for node in nodes), default=0)
    depth = 1
    while depth < levels and len(_boxes(nodes, _opened(nodes, depth + 1))) <= most:
        depth += 1
    return depth


def _opened(nodes: Sequence[GraphNode], depth: int, paths: Collection[str] = ()) -> set[Calls]:
    """Return the calls to open, each with those around it."""
    made: Counter[Calls] = Counter()
    for node in nodes:
        if node.kind == "operation":
            made.update(_outermost(node.calls, len(node.calls)))

    opened: set[Calls] = set()
    for calls in {node.calls for node in nodes}:
        for outer in _outermost(calls, min(depth, len(calls))):
            if made[outer] > 1 or len(outer) < 2:
                opened.add(outer)
        chosen = [level for level, (path, _) in enumerate(calls, 1) if path in paths]
        opened.update(_outermost(calls, max(chosen, default=0)))
    return opened


def _outermost(calls: Calls, levels: int) -> list[Calls]:
    """Return none, the outermost, the two outermost... of some calls, up to so many."""
    return [calls[:level] for level in range(levels + 1)]


def _boxes(nodes: Iterable[GraphNode], opened: set[Calls]) -> list[Box]:
    """Return the boxes: each node is in that of its outermost unopened call, or in a box of its own."""
    filled: dict[Calls | int, list[GraphNode]] = {}
    for node in nodes:
        key: Calls | int = node.number
        for calls in _outermost(node.calls, len(node.calls))[1:]:
            if calls not in opened:
                key = calls
                break
        filled.setdefault(key, []).append(node)

    boxes = []
    for key, inside in filled.items():
        if isinstance(key, tuple):
            boxes.append(Box(key[:-1], tuple(inside), key[-1]))
        else:
            boxes.append(Box(inside[0].calls, tuple(inside)))
    return boxes


def _together(boxes: Sequence[Box], most: int) -> list[Box]:
    """Return at most `most` boxes, each of consecutive boxes.

    Leaves are in the box of the operation that is the first to take them.
    """
    working = [box for box in boxes if box.operations]
    working.sort(key=lambda box: box.operations[0].number)
    size = ceil(len(working) / most)

    groups: list[list[GraphNode]] = []
    users: dict[int, int] = {}
    for first in range(0, len(working), size):
        group: list[GraphNode] = []
        for box in working[first : first + size]:
            group += box.nodes
        for node in group:
            for taken in node.takes:
                users.setdefault(taken, len(groups))
        groups.append(group)

    leaves: dict[int, list[GraphNode]] = {}
    for box in boxes:
        if not box.operations:
            user = users.get(box.nodes[0].number, 0)
            leaves.setdefault(user, []).extend(box.nodes)
    return [Box((), (*leaves.get(i, ()), *group)) for i, group in enumerate(groups)]


def _edges(boxes: Sequence[Box]) -> list[tuple[int, int]]:
    place: dict[int, int] = {}
    for i, box in enumerate(boxes):
        for node in box.nodes:
            place[node.number] = i

    edges: dict[tuple[int, int], None] = {}  # a set that keeps the order
    for i, box in enumerate(boxes):
        for node in box.nodes:
            for taken in node.takes:
                if place[taken] != i:
                    edges[place[taken], i] = None
    return list(edges)
