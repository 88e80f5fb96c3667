"""The autograd graph: its operations, their saved tensors and module calls, and the hooks on it.

# Note [Hooks of nodes]
A node does not list its hooks. But registering a hook returns a handle, which refers to the table
of all of them. So Kedge adds a hook, reads the table, and removes the hook again. An empty table
remains if there was none before; PyTorch goes through it and calls nothing.

# Note [Hooks of tensors that are gone]
A hook on a tensor in the middle of a graph is in a table of the tensor, and no node refers to it.
Kedge finds it on results and leaves, on saved tensors, and on inputs and outputs of modules whose
calls were followed.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from kedge.hooks.placing.module_calls import ModuleCalls, OpenCalls, Span
from kedge.inspection.effects import function_in
from kedge.inspection.owners import library_of, name_of, source_of, taps_behind
from kedge.sites import leaves
from kedge.sites.select import ModelLayout, runs
from kedge.torch_internals import dynamo
from kedge.torch_internals.autograd_nodes import (
    SavedTensor,
    behind,
    edge_of,
    in_order,
    is_leaf,
    is_number,
    operation_number,
    saved_by,
    sequence_number,
    shape_of_output,
)
from kedge.torch_internals.checkpoint import frame_of
from kedge.torch_internals.hook_tables import after_accumulation, on_tensor, table_behind
from kedge.torch_internals.module_tables import buffers_in, parameters_in
from kedge.torch_internals.storages import storages

NodeKind = Literal["operation", "parameter", "leaf"]


@dataclass(frozen=True)
class GraphHook:
    """A hook on a node of a graph, or on a tensor that one makes.

    Attributes:
        kind: "pre" or "post" on the node, "tensor" on a tensor that it makes, "accumulated" on a
            leaf.
        name: The name of the function; for Kedge's own hooks the site and the action.
        owner: "kedge", a library, or file and line of the program's own code.
    """

    kind: str
    name: str
    owner: str

    def __str__(self) -> str:
        """The hook in a line."""
        return f"{self.kind}: {self.name} ({self.owner})"


@dataclass(frozen=True)
class SavedField:
    """A tensor that a node saved.

    Attributes:
        name: Its name in the node, such as "self" or "result"; empty for attributes of a function's
            ``ctx``.
        shape: Its shape; None if a pair of hooks has packed it.
        bytes: The bytes of its storage, if it is the first to save that; 0 for parameters, buffers
            and storages that another node saved before.
        why: The reason for 0 bytes: "parameter", "shared", "packed" or "checkpoint"; empty
            otherwise.
    """

    name: str
    shape: tuple[int, ...] | None
    bytes: int
    why: str = ""


@dataclass(frozen=True)
class GraphNode:
    """A node of a graph.

    Attributes:
        number: Its place in the order of execution, leaves first.
        name: Its name in PyTorch, such as "ConvolutionBackward0".
        kind: An operation, or the accumulation of the gradient of a parameter or another leaf.
        leaf: The parameter's name; for another leaf that of the argument, if it is one.
        shape: Shape of its first output.
        calls: The calls of modules in which it was made, with their numbers, the outermost first.
        saved: The tensors that it saved.
        hooks: The hooks on it and on its results.
        takes: The numbers of the nodes whose outputs it takes.
    """

    number: int
    name: str
    kind: NodeKind
    leaf: str
    shape: tuple[int, ...] | None
    calls: tuple[Span, ...]
    saved: tuple[SavedField, ...]
    hooks: tuple[GraphHook, ...]
    takes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The bytes that it holds for backward, alone or as the first."""
        return sum(field.bytes for field in self.saved)


class CallFollower(ModuleCalls):
    """Follows the calls of a model's modules, to know which of them made a node.

    Nodes are identified by their numbers, see Note [Whose node], and only for one thread.
    """

    def __init__(self) -> None:
        thread = threading.get_ident()
        super().__init__(lambda _tensor: (), skip=lambda _module: threading.get_ident() != thread)
        self._from: list[int] = []
        self._stacks: list[tuple[Span, ...]] = []
        self.kept: list[tuple[Node | None, int, Any, Tensor]] = []
        self.arguments: dict[int, str] = {}

    def _begin(self, calls: OpenCalls[Span], path: str, module: nn.Module, given: Any) -> Span:
        if not calls.called:
            args, kwargs = given
            named = [*leaves.find(args), *leaves.find(kwargs)]
            self.arguments.update((id(tensor), name) for name, tensor in named)
        span = super()._begin(calls, path, module, given)
        self.keep(given)
        self._mark((*calls.notes, span))
        return span

    def _end(self, calls: OpenCalls[Span], span: Span, output: Any) -> None:
        self._mark(tuple(calls.notes))
        self.keep(output)

    def keep(self, value: Any) -> None:
        """Keep inputs or outputs of a module, for the hooks on them."""
        for _, tensor in leaves.find(value):
            if tensor.requires_grad:
                self.kept.append((tensor.grad_fn, tensor.output_nr, on_tensor(tensor), tensor))

    def of(self, number: int) -> tuple[Span, ...]:
        """Return the active calls when a node was made."""
        at = bisect_right(self._from, number)
        if at == 0:
            return ()
        return self._stacks[at - 1]

    def _mark(self, under_way: tuple[Span, ...]) -> None:
        self._from.append(operation_number())
        self._stacks.append(under_way)


@contextmanager
def following(model: nn.Module) -> Iterator[CallFollower]:
    """A follower of the calls of a model's modules during a block."""
    model = dynamo.unwrap(model)
    layout = ModelLayout(model)
    paths = []
    for path, module in layout.modules.items():
        if layout.first[id(module)] == path and runs(module):
            paths.append(path)

    calls = CallFollower()
    try:
        calls.add(model, paths, str)
        yield calls
    finally:
        calls.close()


def read_graph(
    results: Any,
    model: nn.Module | None = None,
    calls: CallFollower | None = None,
    named: Mapping[str, Tensor] | None = None,
) -> tuple[GraphNode, ...]:
    """Return the graph behind some results, without running, unpacking or keeping anything.

    Args:
        results: A tensor, or any structure of tensors; or a node.
        model: The model whose parameters give leaves their names, and whose parameters and buffers
            are not counted.
        calls: The follower of the calls of the model's modules; without it nodes have no modules.
        named: Other leaves and tensors of the graph by their names, whose hooks are found, too.

    Returns:
        The nodes in the order of execution.
    """
    with torch.no_grad():
        return tuple(_Reader(results, model, calls, named or {}).nodes())


def nodes_behind(results: Any) -> list[Node]:
    """Return the autograd nodes behind some results, in the order of `read_graph`."""
    edges = [edge_of(tensor) for _, tensor in leaves.find(results)]
    return _in_order(behind(edge.node for edge in edges if edge is not None))


class _Reader:
    def __init__(
        self,
        results: Any,
        model: nn.Module | None,
        calls: CallFollower | None,
        named: Mapping[str, Tensor],
    ) -> None:
        self.roots = [tensor for _, tensor in leaves.find(results)]
        self.begins: list[Node] = []
        if isinstance(results, Node):
            self.begins.append(results)
        for root in self.roots:
            edge = edge_of(root)
            if edge is not None:
                self.begins.append(edge.node)

        self.calls = calls
        self.named = named
        self.others = {id(tensor): name for name, tensor in named.items()}
        self.names: dict[int, str] = {}
        self.owned: set[int] = set()
        if model is not None:
            parameters = parameters_in(model)
            buffers = buffers_in(model)
            self.names = {id(p): name for name, p in parameters.items()}
            self.owned = set(storages([*parameters.values(), *buffers.values()]))
        self.counted: dict[int, torch.UntypedStorage] = {}
        self.tables: dict[Node, dict[int, Any]] = {}

    def nodes(self) -> Iterator[GraphNode]:
        """Yield the nodes in order."""
        found = _in_order(behind(self.begins))
        places = {node: place for place, node in enumerate(found)}
        self._collect(found)
        for place, node in enumerate(found):
            nodes_before = [before for before, _ in node.next_functions if before is not None]
            takes = [places[before] for before in nodes_before]
            variable = getattr(node, "variable", None)
            described = GraphNode(
                number=place,
                name=node.name().rpartition("::")[2],
                kind="operation",
                leaf="",
                shape=None,
                calls=(),
                saved=tuple(self._saved(node)),
                hooks=tuple(self._hooks(node, variable)),
                takes=tuple(dict.fromkeys(takes)),
            )
            if variable is None:
                calls: tuple[Span, ...] = ()
                if self.calls is not None:
                    calls = self.calls.of(sequence_number(node))
                yield replace(described, shape=shape_of_output(node), calls=calls)
            else:
                kind: NodeKind = "parameter" if id(variable) in self.names else "leaf"
                shape = leaves.shape_of(variable)
                yield replace(described, kind=kind, leaf=self._named(variable), shape=shape)

    def _named(self, variable: Tensor) -> str:
        name = self.names.get(id(variable))
        if not name and self.calls is not None:
            name = self.calls.arguments.get(id(variable))
        return name or self.others.get(id(variable), "")

    def _saved(self, node: Node) -> Iterator[SavedField]:
        for name, saved in saved_by(node):
            value = saved.data
            if isinstance(value, Tensor):
                yield from self._field(name, value)
            elif isinstance(saved, SavedTensor) and value is not None:
                packed = frame_of(saved.unpack_hook) is None
                why = "packed" if packed else "checkpoint"
                yield SavedField(name, None, 0, why)
        # Attributes that a function of the program set on its ctx.
        for value in getattr(node, "__dict__", {}).values():
            if isinstance(value, Tensor):
                yield from self._field("", value)

    def _field(self, name: str, value: Tensor) -> Iterator[SavedField]:
        if not is_number(value):
            size, why = self._charge(value)
            yield SavedField(name, leaves.shape_of(value), size, why)

    def _charge(self, value: Tensor) -> tuple[int, str]:
        """Count the storages of a tensor that no tensor before it saved."""
        own = storages([value])
        if self.owned.issuperset(own):
            return 0, "parameter"
        counted = self.counted
        owned = self.owned
        new = {n: one for n, one in own.items() if n not in counted and n not in owned}
        if not new:
            return 0, "shared"
        self.counted |= new
        return sum(storage.nbytes() for storage in new.values()), ""

    def _collect(self, found: Iterable[Node]) -> None:
        """Collect the tables of hooks of tensors that still exist.

        See Note [Hooks of tensors that are gone].
        """
        for root in self.roots:
            self._table(root.grad_fn, on_tensor(root))
        for tensor in self.named.values():
            self._table(_maker(tensor), on_tensor(tensor))
        for node in found:
            for _, saved in saved_by(node):
                value = saved.data
                if isinstance(value, Tensor) and value.requires_grad:
                    self._table(value.grad_fn, on_tensor(value))
        if self.calls is None:
            return
        for maker, number, table, tensor in self.calls.kept:
            still = tensor.grad_fn is maker and tensor.output_nr == number
            if table or not still:
                self._table(maker, table)
            else:
                self._table(maker, on_tensor(tensor))

    def _table(self, node: Node | None, table: Any) -> None:
        if node is not None and table:
            self.tables.setdefault(node, {})[id(table)] = table

    def _hooks(self, node: Node, variable: Tensor | None) -> Iterator[GraphHook]:
        own = {"tensor": self.tables.get(node, {}).values(), **_on_node(node)}
        if variable is not None:
            own["tensor"] = [on_tensor(variable) or {}]
            own["accumulated"] = [after_accumulation(variable) or {}]
        for kind, tables in own.items():
            for table in tables:
                for hook in table.values():
                    yield from _described(kind, hook)


def _in_order(found: Iterable[Node]) -> list[Node]:
    """Return the leaves in the order of their use, then the other nodes in the order of execution."""
    nodes = list(found)
    operations = in_order(node for node in nodes if not is_leaf(node))
    ordered: dict[Node, None] = {}  # a set that keeps the order
    for node in operations:
        for before, _ in node.next_functions:
            if before is not None and is_leaf(before):
                ordered[before] = None
    for node in nodes:
        if is_leaf(node):
            ordered.setdefault(node)
    return [*ordered, *operations]


def _maker(tensor: Tensor) -> Node | None:
    """Return the node that made a tensor; None for a leaf, and for a view whose history is lost."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def _on_node(node: Node) -> dict[str, list[Mapping[int, Any]]]:
    """Return the tables of a node's own hooks; see Note [Hooks of nodes]."""
    before = table_behind(node.register_prehook) or {}
    after = table_behind(node.register_hook) or {}
    return {"pre": [dict(before)], "post": [dict(after)]}


def node_tables(node: Node) -> tuple[Any, Any]:
    """Return a node's tables of hooks before and after it runs themselves; see Note [Hooks of nodes]."""
    return table_behind(node.register_prehook), table_behind(node.register_hook)


def hooks_of_node(node: Node) -> Iterator[tuple[str, int, Any]]:
    """Yield a node's own hooks: "pre" or "post", the place in the firing order, and the function."""
    for kind, tables in _on_node(node).items():
        for table in tables:
            for order, hook in enumerate(table.values()):
                yield kind, order, hook


def _described(kind: str, hook: Any) -> Iterator[GraphHook]:
    function = function_in(hook)
    library = library_of(function)
    if library == "kedge":
        taps = taps_behind(hook)
        for tap in taps:
            yield GraphHook(kind, f"{tap.site} {tap.label}", "kedge")
        if taps:
            return
    owner = library or source_of(function) or "built in"
    yield GraphHook(kind, name_of(hook), owner)
