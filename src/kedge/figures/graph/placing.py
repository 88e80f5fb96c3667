"""The assignment of nodes to module calls for graphs whose forward Kedge did not follow.

# Note [Placed by parameters]
Without the calls, a node that takes a module's own parameters belongs to that module. Nodes between
two such nodes in the order of execution belong to the innermost module around both. That is right
for operations between a module's layers, and one level too high for operations after its last
layer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from kedge.figures.graph.folding import Call, Calls
from kedge.inspection.autograd_graph import GraphNode

_SHAPING = frozenset(
    (
        "T",
        "Transpose",
        "Permute",
        "View",
        "UnsafeView",
        "Reshape",
        "Expand",
        "Squeeze",
        "Unsqueeze",
        "Slice",
        "Select",
        "Split",
        "ToCopy",
    )
)
"""Operations on a parameter before its use."""


def by_use(nodes: Sequence[GraphNode]) -> tuple[GraphNode, ...]:
    """Return the nodes with each parameter in the innermost call around all its users.

    Other leaves stay outside.
    """
    users: dict[int, list[Calls]] = {}
    for node in nodes:
        for taken in node.takes:
            users.setdefault(taken, []).append(node.calls)

    placed = list(nodes)
    for i, node in enumerate(nodes):
        if node.kind == "parameter" and node.number in users:
            placed[i] = replace(node, calls=around(users[node.number]))
    return tuple(placed)


def by_parameters(nodes: Sequence[GraphNode], modules: Container[str]) -> tuple[GraphNode, ...]:
    """Return nodes of unknown calls with calls; see Note [Placed by parameters].

    Args:
        nodes: The nodes.
        modules: The paths of the modules that run.
    """
    known: dict[int, Calls] = {}
    derived: dict[int, Calls] = {}  # of parameters, and of reshaped or cast ones
    for node in nodes:
        if node.kind == "parameter":
            owner, _, _ = node.leaf.rpartition(".")
            derived[node.number] = _calls(owner, modules)
        if node.kind != "operation":
            continue
        owners = [derived[number] for number in node.takes if derived.get(number)]
        if owners:
            known[node.number] = around(owners)
        if owners and node.name.partition("Backward")[0] in _SHAPING:
            derived[node.number] = known[node.number]
    return tuple(_between(nodes, known))


def _between(nodes: Sequence[GraphNode], known: dict[int, Calls]) -> Iterable[GraphNode]:
    following: list[Calls | None] = []
    after: Calls | None = None
    for node in reversed(nodes):
        after = known.get(node.number, after)
        following.append(after)

    before: Calls | None = None
    for node, after in zip(nodes, reversed(following), strict=True):
        before = known.get(node.number, before)
        if node.kind != "operation":
            yield node
        elif before is None or after is None:  # before the first layer, or after the last one
            yield replace(node, calls=())
        else:
            yield replace(node, calls=around([before, after]))


def around(several: Iterable[Calls]) -> Calls:
    """Return the calls common to all, from the outermost on."""
    first, *others = several
    level = 0
    while level < len(first) and all(calls[: level + 1] == first[: level + 1] for calls in others):
        level += 1
    return first[:level]


def _calls(path: str, modules: Container[str]) -> Calls:
    """Return the calls of a module and of the modules around it, as if each ran once."""
    paths = [""]
    if path:
        names = path.split(".")
        paths += [".".join(names[:end]) for end in range(1, len(names) + 1)]
    calls: list[Call] = [(each, 0) for each in paths if each in modules]
    return tuple(calls)
