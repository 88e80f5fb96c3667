"""Which module's call a node belongs to, where it was not seen when it was made.

# Note [Placed by parameters]
Without the calls, a node that takes a module's own parameters belongs to that module. What lies between two such nodes in
the order of execution belongs to the innermost module that is around both. That is right for what a module does between
its layers, and one level too high for what it does behind its last layer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from kedge.figures.graph.folding import Call, Calls
from kedge.inspect.autograd_graph import GraphNode

_SHAPING = frozenset(
    ("T", "Transpose", "Permute", "View", "UnsafeView", "Reshape", "Expand", "Squeeze", "Unsqueeze", "Slice", "Select")
) | {"Split", "ToCopy"}
"""What is done to a parameter before it is used."""


def by_use(nodes: Sequence[GraphNode]) -> tuple[GraphNode, ...]:
    """Place each parameter in the innermost call around all that take it; other leaves stay outside."""
    users: dict[int, list[Calls]] = {}
    for node in nodes:
        for taken in node.takes:
            users.setdefault(taken, []).append(node.calls)
    return tuple(
        replace(node, calls=around(users[node.number])) if node.kind == "parameter" and node.number in users else node
        for node in nodes
    )


def by_parameters(nodes: Sequence[GraphNode], modules: Container[str]) -> tuple[GraphNode, ...]:
    """Place nodes whose calls are not known; see Note [Placed by parameters].

    Args:
        nodes: The nodes.
        modules: The paths of the modules that are called.
    """
    known: dict[int, Calls] = {}
    derived: dict[int, Calls] = {}  # of parameters, and of what is but another form of one
    for node in nodes:
        if node.kind != "operation":
            derived[node.number] = _calls(node.leaf.rpartition(".")[0], modules) if node.kind == "parameter" else ()
            continue
        owners = [derived[number] for number in node.takes if derived.get(number)]
        if owners:
            known[node.number] = around(owners)
        if owners and node.name.partition("Backward")[0] in _SHAPING:
            derived[node.number] = known[node.number]
    return tuple(_between(nodes, known))


def _between(nodes: Sequence[GraphNode], known: dict[int, Calls]) -> Iterable[GraphNode]:
    before: Calls | None = None
    following: list[Calls | None] = []
    for node in reversed(nodes):
        following.append(next(iter(following[-1:]), None) if node.number not in known else known[node.number])
    for node, after in zip(nodes, reversed(following), strict=True):
        before = known.get(node.number, before)
        if node.kind != "operation":
            yield node
        elif before is None or after is None:  # before the first layer, or behind the last one
            yield replace(node, calls=())
        else:
            yield replace(node, calls=around([before, after]))


def around(several: Iterable[Calls]) -> Calls:
    """Return the calls that are around all."""
    first, *others = several
    level = 0
    while level < len(first) and all(calls[: level + 1] == first[: level + 1] for calls in others):
        level += 1
    return first[:level]


def _calls(path: str, modules: Container[str]) -> Calls:
    """Return a module's path and those of the modules around it, as if each had been called once."""
    names = path.split(".") if path else []
    paths = [".".join(names[:end]) for end in range(len(names) + 1)]
    calls: list[Call] = [(each, 0) for each in paths if each in modules]
    return tuple(calls)
