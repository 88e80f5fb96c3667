"""The audit of a tensor or an autograd node: its hooks, its state, and the graph behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.autograd.graph import Node

from kedge.inspection.autograd_graph import GraphHook, GraphNode, hooks_of_node, read_graph
from kedge.inspection.effects import CopyTrial, FoundHook
from kedge.inspection.hook_entries import Audit, HookEntry, entry_of
from kedge.short_text import counted, listed, sized
from kedge.sites.leaves import describe
from kedge.torch_internals.autograd_nodes import behind, is_freed
from kedge.torch_internals.hook_tables import hooks_on_tensor
from kedge.torch_internals.tensors import base_of, version_of

_KINDS = {
    "pre": "node-pre",
    "post": "node-post",
    "tensor": "tensor",
    "accumulated": "post-accumulate",
}
_SHOWN = 6


@dataclass(frozen=True, repr=False)
class TensorAudit(Audit):
    """The hooks on a tensor and in the graph behind it, and the tensor's state.

    Attributes:
        is_leaf: Whether no operation with a graph made it.
        requires_grad: Whether it has a gradient.
        retains_grad: Whether its gradient is kept in ``.grad``: on a leaf that requires grad, or
            after ``retain_grad()``.
        version: The number of its changes in place; -1 if PyTorch does not count them.
        made_by: The name of the node that made it; empty for a leaf.
        nodes: The graph behind it, in the order of execution; of a leaf that requires grad the node
            that accumulates.
    """

    is_leaf: bool = True
    requires_grad: bool = False
    retains_grad: bool = False
    version: int = 0
    made_by: str = ""
    nodes: tuple[GraphNode, ...] = ()

    @property
    def leaves(self) -> tuple[str, ...]:
        """The leaves that it depends on: their names, or shapes where no name is known."""
        return _leaves(self.nodes)

    @property
    def bytes(self) -> int:
        """The bytes that the graph saved for backward, each storage once."""
        return sum(node.bytes for node in self.nodes)


@dataclass(frozen=True, repr=False)
class NodeAudit(Audit):
    """The hooks on an autograd node and in the graph behind it.

    Attributes:
        nodes: The node, last, and the graph behind it, in the order of execution.
    """

    nodes: tuple[GraphNode, ...] = ()

    @property
    def node(self) -> GraphNode:
        """The node itself: the tensors that it saved, and the numbers of the nodes that it takes."""
        return self.nodes[-1]

    @property
    def takes(self) -> tuple[GraphNode, ...]:
        """The nodes to which it passes gradients: its ``next_functions``."""
        return tuple(self.nodes[number] for number in self.node.takes)

    @property
    def leaves(self) -> tuple[str, ...]:
        """The leaves that it depends on: their names, or shapes where no name is known."""
        return _leaves(self.nodes)


def audit_tensor(tensor: Tensor, name: str, named: Mapping[str, Tensor]) -> TensorAudit:
    """Return the audit of a tensor.

    Args:
        tensor: The tensor.
        name: The program's name for it.
        named: Other tensors by their names.
    """
    kind = "Parameter" if isinstance(tensor, nn.Parameter) else "Tensor"
    found = hooks_on_tensor(tensor)
    own = _entries(FoundHook(one.kind, one.hook, name, kind, one.order) for one in found)
    nodes = read_graph(tensor, named=named)

    starts = [] if tensor.grad_fn is None else [tensor.grad_fn]
    facts = [*_state(tensor), *_graph(nodes, starts)]
    return TensorAudit(
        model=name,
        entries=(*own, *_in_graph(nodes, on_root=("tensor", "accumulated"))),
        what="tensor",
        facts=tuple(facts),
        is_leaf=tensor.is_leaf,
        requires_grad=tensor.requires_grad,
        retains_grad=_retains(tensor),
        version=version_of(tensor),
        made_by=_made_by(tensor),
        nodes=nodes,
    )


def audit_node(node: Node, named: Mapping[str, Tensor]) -> NodeAudit:
    """Return the audit of a node.

    Args:
        node: The node.
        named: Tensors by their names.
    """
    nodes = read_graph(node, named=named)
    name = nodes[-1].name
    found = hooks_of_node(node)
    own = _entries(FoundHook(_KINDS[kind], hook, name, "", i) for kind, i, hook in found)
    facts = [
        ("takes", _taken(nodes)),
        ("saved", _saved(nodes[-1], freed=is_freed(node))),
        *_graph(nodes, [node]),
    ]
    entries = (*own, *_in_graph(nodes, on_root=("pre", "post")))
    return NodeAudit(name, entries, "node", tuple(facts), nodes=nodes)


def _entries(found: Iterable[FoundHook]) -> tuple[HookEntry, ...]:
    trial = CopyTrial(())
    return tuple(entry_of(each, trial) for each in found)


def _made_by(tensor: Tensor) -> str:
    """Return the name of the node that made a tensor; empty for a leaf."""
    if tensor.grad_fn is None:
        return ""
    return tensor.grad_fn.name().rpartition("::")[2]


def _retains(tensor: Tensor) -> bool:
    return tensor.requires_grad and (tensor.is_leaf or tensor.retains_grad)


def _state(tensor: Tensor) -> Iterator[tuple[str, str]]:
    yield "value", f"{describe(tensor)} on {tensor.device}"

    if tensor.grad_fn is not None and tensor.output_nr:
        yield "leaf", f"no: made by {_made_by(tensor)}, output {tensor.output_nr}"
    elif tensor.grad_fn is not None:
        yield "leaf", f"no: made by {_made_by(tensor)}"
    elif tensor.requires_grad:
        yield "leaf", "yes"
    else:
        yield "leaf", "yes: it does not require grad, so it has no graph and no gradient"

    if _retains(tensor):
        now = None if tensor.grad is None else describe(tensor.grad)
        yield "grad", f"kept in .grad, now {now}"
    elif tensor.requires_grad:
        yield "grad", "not kept: call retain_grad() or hook the tensor"

    version = version_of(tensor)
    if version < 0:
        yield "version", "not counted"
    elif version == 0:
        yield "version", "0: never changed in place"
    else:
        yield "version", f"{version}: changed in place {counted(version, 'time')}"

    base = base_of(tensor)
    if base is not None:
        yield "view", f"of a tensor {describe(base)}, with which it shares memory and version"


def _graph(nodes: Sequence[GraphNode], starts: Sequence[Node]) -> Iterator[tuple[str, str]]:
    operations = [node for node in nodes if node.kind == "operation"]
    if not operations:
        return
    graph = counted(len(operations), "operation")
    found = list(_leaves(nodes))
    if found:
        leaves = "1 leaf" if len(found) == 1 else f"{len(found):,} leaves"
        graph += f" back to {leaves}: {listed(found, _SHOWN)}"
    yield "graph", graph

    held = f"{sized(sum(node.bytes for node in nodes))} for backward"
    if any(is_freed(node) for node in behind(starts)):
        held += "; a backward has freed the rest, and another one raises"
    yield "holds", held


def _leaves(nodes: Sequence[GraphNode]) -> tuple[str, ...]:
    return tuple(_leaf(node) for node in nodes if node.kind != "operation")


def _leaf(node: GraphNode) -> str:
    """Return a leaf's name, or its shape where no name is known."""
    return node.leaf or str(list(node.shape or ()))


def _taken(nodes: Sequence[GraphNode]) -> str:
    taken = [_named(nodes[number]) for number in nodes[-1].takes]
    if not taken:
        return "nothing: it passes no gradient on"
    return listed(taken, _SHOWN)


def _named(node: GraphNode) -> str:
    if node.kind == "operation":
        return f"{node.name} #{node.number}"
    return f"{node.name} of {_leaf(node)}"


def _saved(node: GraphNode, *, freed: bool) -> str:
    if freed:
        return "nothing any more: a backward has freed it"
    if not node.saved:
        return "nothing"
    shown = []
    for field in node.saved:
        shape = "packed" if field.shape is None else list(field.shape)
        shown.append(f"{field.name} {shape}")
    return f"{listed(shown, _SHOWN)}; {sized(node.bytes)} held by it first"


def _in_graph(nodes: Sequence[GraphNode], on_root: tuple[str, ...]) -> Iterator[HookEntry]:
    """Yield the hooks in a graph, without the audited object's own.

    Those are of certain kinds on the last node.
    """
    for node in nodes:
        orders: dict[str, int] = {}
        for hook in node.hooks:
            order = orders[hook.kind] = orders.get(hook.kind, -1) + 1
            if node is not nodes[-1] or hook.kind not in on_root:
                yield _entry(hook, node, order)


def _entry(hook: GraphHook, node: GraphNode, order: int) -> HookEntry:
    path = _named(node)
    notes: tuple[str, ...] = ()
    if hook.kind in ("tensor", "accumulated") and node.kind != "operation":
        path = node.leaf or f"a leaf {_leaf(node)}"
    elif hook.kind == "tensor":
        notes = ("on its result",)
    return HookEntry(
        kind=_KINDS[hook.kind],
        path=path,
        type="",
        order=order,
        name=hook.name,
        owner=hook.owner,
        source=hook.owner if ":" in hook.owner else "",
        notes=notes,
        effects=(),
    )
