"""Graph folding: the choice of module calls drawn as one box, and of calls that are opened.

# Note [Opened modules]
A call is opened only if the calls around it are open, and if it made more than one operation.
Without a depth, calls are opened level by level, as long as the drawing stays within a number of
boxes. If the first level alone exceeds that number, consecutive boxes in the order of execution are
joined: data flows in that order, so joining adds no cycle to the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
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
        return tuple(hook for node in self.nodes for hook in node.hooks)


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
    boxes = _boxes(nodes, _opened(nodes, _deepest(nodes, most) if depth is None else depth, opened))
    if depth is None and not opened and len(boxes) > most:
        boxes = _together(boxes, most)
    return FoldedGraph(tuple(boxes), tuple(_edges(boxes)))


def _deepest(nodes: Sequence[GraphNode], most: int) -> int:
    """Return the number of levels that can be opened within `most` boxes."""
    levels = max((len(node.calls) for node in nodes), default=0)
    depth = 1
    while depth < levels and len(_boxes(nodes, _opened(nodes, depth + 1))) <= most:
        depth += 1
    return depth


def _opened(nodes: Sequence[GraphNode], depth: int, paths: Collection[str] = ()) -> set[Calls]:
    """Return the calls to open, each with those around it."""
    known = {node.calls for node in nodes}
    made = Counter(
        node.calls[:level]
        for node in nodes
        if node.kind == "operation"
        for level in range(len(node.calls) + 1)
    )
    whole = {calls[:level] for calls in known for level in range(min(depth, len(calls)) + 1)}
    opened = {calls for calls in whole if made[calls] > 1 or len(calls) < 2}
    for calls in known:
        chosen = max(
            (level for level, (path, _) in enumerate(calls, 1) if path in paths), default=0
        )
        opened |= {calls[:level] for level in range(chosen + 1)}
    return opened


def _boxes(nodes: Iterable[GraphNode], opened: set[Calls]) -> list[Box]:
    """Return the boxes: each node is in that of its outermost unopened call, or in a box of its own."""
    filled: dict[Calls | int, list[GraphNode]] = {}
    for node in nodes:
        closed = next(
            (node.calls[:n] for n in range(1, len(node.calls) + 1) if node.calls[:n] not in opened),
            None,
        )
        filled.setdefault(node.number if closed is None else closed, []).append(node)
    return [
        Box(key[:-1], tuple(inside), key[-1])
        if isinstance(key, tuple)
        else Box(inside[0].calls, tuple(inside))
        for key, inside in filled.items()
    ]


def _together(boxes: Sequence[Box], most: int) -> list[Box]:
    """Return at most `most` boxes, each of consecutive boxes and of the leaves that its operations are the first to take."""
    working = sorted(
        (box for box in boxes if box.operations), key=lambda box: box.operations[0].number
    )
    size = ceil(len(working) / most)
    groups = [working[i : i + size] for i in range(0, len(working), size)]
    users: dict[int, int] = {}
    for place, group in enumerate(groups):
        for number in (number for box in group for node in box.nodes for number in node.takes):
            users.setdefault(number, place)
    leaves: dict[int, list[GraphNode]] = {}
    for box in boxes:
        if not box.operations:
            leaves.setdefault(users.get(box.nodes[0].number, 0), []).extend(box.nodes)
    joined = [
        [*leaves.get(i, ()), *(node for box in group for node in box.nodes)]
        for i, group in enumerate(groups)
    ]
    return [Box((), tuple(nodes)) for nodes in joined]


def _edges(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Return the pairs of boxes between which data flows, each pair once."""
    place = {node.number: i for i, box in enumerate(boxes) for node in box.nodes}
    pairs = (
        (place[taken], i)
        for i, box in enumerate(boxes)
        for node in box.nodes
        for taken in node.takes
    )
    return iter(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))
