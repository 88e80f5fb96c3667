"""The graph of a forward: which operation's result went into which operation.

Autograd's graph has only what a backward needs. This one has every visible operation, also under
``torch.no_grad()``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from kedge.by_identity import ByIdentity
from kedge.flow import Act, Event
from kedge.hooks.placing.module_calls import Span
from kedge.hooks.session import Session
from kedge.inspection.autograd_graph import CallFollower, GraphNode, following
from kedge.inspection.function_operations import OutsideObserver, OutsideOperation
from kedge.sites import leaves
from kedge.sites.site import Site
from kedge.torch_internals import dynamo
from kedge.torch_internals.module_tables import buffers_in, parameters_in


class ForwardGraph:
    """The operations of a forward, each with the places of those whose results it takes.

    It holds tensors weakly: a result that is gone cannot be taken by a later operation.

    Args:
        model: The model, whose parameters and buffers have names; None without one.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._nodes: list[GraphNode] = []
        self._makers: ByIdentity[Tensor, int] = ByIdentity()
        self._parameters: dict[int, str] = {}
        self.names: dict[int, str] = {}
        if model is not None:
            self._parameters = {id(p): name for name, p in parameters_in(model).items()}
            self.names = {id(b): name for name, b in buffers_in(model).items()}

    def taken(self, value: Tensor) -> int:
        """Return the number of the node that made a tensor; one that none made is a new leaf."""
        known = self._makers.get(value)
        if known is not None:
            return known
        name = self._parameters.get(id(value))
        if name is not None:
            return self._add(value, "parameter", name, "parameter")
        name = self.names.get(id(value), "")
        if not name or name.isdecimal():
            name = f"input {name}".rstrip()
        return self._add(value, "leaf", name, "input")

    def _add(self, value: Tensor, kind: Any, leaf: str, name: str) -> int:
        node = GraphNode(len(self._nodes), name, kind, leaf, leaves.shape_of(value), (), (), (), ())
        self._nodes.append(node)
        self._makers[value] = node.number
        return node.number

    def made(
        self, name: str, taken: Sequence[int], results: Sequence[Tensor], calls: tuple[Span, ...]
    ) -> int:
        """Add an operation with what it took and its results; returns its number."""
        shape = None
        if results:
            shape = leaves.shape_of(results[0])
        takes = tuple(dict.fromkeys(taken))
        number = len(self._nodes)
        self._nodes.append(GraphNode(number, name, "operation", "", shape, calls, (), (), takes))
        for value in results:
            self._makers[value] = number
        return number

    def has_made(self, value: Tensor, since: int) -> bool:
        """Whether a node made a tensor that came after the first so many nodes."""
        maker = self._makers.get(value)
        return maker is not None and maker >= since and self._nodes[maker].kind == "operation"

    def __len__(self) -> int:
        """Return the number of nodes so far."""
        return len(self._nodes)

    def makes(self, number: int, value: Tensor) -> None:
        """Note one more result of an operation."""
        self._makers[value] = number
        if self._nodes[number].shape is None:
            self._nodes[number] = replace(self._nodes[number], shape=leaves.shape_of(value))

    def in_order(self) -> list[GraphNode]:
        """Return the nodes with the numbers that `taken` and `made` gave them, leaves first."""
        return sorted(self._nodes, key=lambda node: (node.kind == "operation", node.number))

    def nodes(self) -> tuple[GraphNode, ...]:
        """Return the nodes: leaves first, in the order of their use, then the operations in theirs."""
        order = self.in_order()
        places = {node.number: place for place, node in enumerate(order)}
        moved = []
        for place, node in enumerate(order):
            takes = tuple(places[number] for number in node.takes)
            moved.append(replace(node, number=place, takes=takes))
        return tuple(moved)


class _Begun(NamedTuple):
    """An operation that has begun: how many nodes there were, and the numbers of those it takes."""

    at: int
    taken: list[int]


class _InModules:
    """The action that adds the operations of a model's modules to a graph."""

    observes = True

    def __init__(self, graph: ForwardGraph, calls: CallFollower) -> None:
        self.graph = graph
        self.calls = calls
        self._begun: dict[Any, _Begun] = {}
        self._last: tuple[Any, int | None] | None = None

    def bind(self, site: Site) -> Act:
        """Return the function that is called with the inputs and results of one module's operations."""

        def act(value: Tensor, event: Event) -> None:
            graph = self.graph
            operation = event.pass_, event.call, event.site.path, event.site.op
            if event.site.kind == "in":
                graph.names.update(self.calls.arguments)
                if self._last is not None and self._last[0] == operation:
                    self._last = None
                begun = self._begun.setdefault(operation, _Begun(len(graph), []))
                begun.taken.append(graph.taken(value))
                return
            if self._last is not None and self._last[0] == operation:
                if self._last[1] is not None:
                    graph.makes(self._last[1], value)
                return
            begun = self._begun.pop(operation, _Begun(len(graph), []))
            if graph.has_made(value, since=begun.at):  # by an operation inside of this one
                self._last = operation, None
                return
            name = event.site.op[0] if event.site.op else ""
            number = graph.made(name, begun.taken, [value], self.calls.under_way)
            self._last = operation, number

        return act


class _OutsideModules(OutsideObserver):
    """The mode that adds the operations outside of modules to a graph."""

    def __init__(self, graph: ForwardGraph) -> None:
        super().__init__()
        self.graph = graph

    def begins(self, args: Any, kwargs: Any) -> list[int]:
        """Return the nodes that an operation takes, before it may change one of them."""
        return [self.graph.taken(tensor) for _, tensor in leaves.find((args, kwargs or {}))]

    def made(self, operation: OutsideOperation) -> None:
        """Add an operation."""
        self.graph.made(operation.name, operation.begun, operation.made, ())


@contextmanager
def forward_graph(
    model: nn.Module | None, names: Mapping[int, str] | None = None
) -> Iterator[tuple[ForwardGraph, CallFollower | None]]:
    """The graph of a forward during a block, and the follower of the model's calls."""
    graph = ForwardGraph(model)
    graph.names.update(names or {})
    outside = _OutsideModules(graph)
    if model is None:
        outside.start()
        try:
            yield graph, None
        finally:
            outside.stop()
        return
    session = Session()
    with following(model) as calls:
        session.hook(dynamo.unwrap(model), "**/*:in, **/*:out", _InModules(graph, calls))
        outside.start()
        try:
            yield graph, calls
        finally:
            outside.stop()
            session.end(quiet=True)
