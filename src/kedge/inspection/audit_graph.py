"""The audit of a tensor or an autograd node: its own hooks, its state, and the graph behind it with the hooks there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    found = (
        FoundHook(one.kind, one.hook, name, kind, one.order) for one in hooks_on_tensor(tensor)
    )
    own, nodes = _entries(found), read_graph(tensor, named=named)
    made_by = tensor.grad_fn
    facts = [*_state(tensor), *_graph(nodes, _starts(tensor))]
    return TensorAudit(
        model=name,
        entries=(*own, *_in_graph(nodes, on_root=("tensor", "accumulated"))),
        what="tensor",
        facts=tuple(facts),
        is_leaf=tensor.is_leaf,
        requires_grad=tensor.requires_grad,
        retains_grad=_retains(tensor),
        version=version_of(tensor),
        made_by="" if made_by is None else made_by.name().rpartition("::")[2],
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
    found = (FoundHook(_KINDS[kind], hook, name, "", i) for kind, i, hook in hooks_of_node(node))
    facts = [
        ("takes", _taken(nodes)),
        ("saved", _saved(nodes[-1], freed=is_freed(node))),
        *_graph(nodes, [node]),
    ]
    others = (*_entries(found), *_in_graph(nodes, on_root=("pre", "post")))
    return NodeAudit(name, others, "node", tuple(facts), nodes=nodes)


def _entries(found: Iterator[FoundHook]) -> tuple[HookEntry, ...]:
    trial = CopyTrial(())
    return tuple(entry_of(each, trial) for each in found)


def _retains(tensor: Tensor) -> bool:
    return tensor.requires_grad and (tensor.is_leaf or tensor.retains_grad)


def _starts(tensor: Tensor) -> list[Node]:
    return [] if tensor.grad_fn is None else [tensor.grad_fn]


def _state(tensor: Tensor) -> Iterator[tuple[str, str]]:
    """The state of a tensor in words."""
    yield "value", f"{describe(tensor)} on {tensor.device}"
    made_by = tensor.grad_fn
    if made_by is None:
        yield (
            "leaf",
            "yes"
            if tensor.requires_grad
            else "yes: it does not require grad, so it has no graph and no gradient",
        )
    else:
        number = f", output {tensor.output_nr}" if tensor.output_nr else ""
        yield "leaf", f"no: made by {made_by.name().rpartition('::')[2]}{number}"
    if tensor.requires_grad:
        there = (
            ""
            if not _retains(tensor)
            else f", now {'None' if tensor.grad is None else describe(tensor.grad)}"
        )
        yield (
            "grad",
            f"kept in .grad{there}"
            if _retains(tensor)
            else "not kept: call retain_grad() or hook the tensor",
        )
    version = version_of(tensor)
    yield "version", "not counted" if version < 0 else f"{version}: {_changes(version)}"
    if (base := base_of(tensor)) is not None:
        yield "view", f"of a tensor {describe(base)}, with which it shares memory and version"


def _changes(version: int) -> str:
    return (
        "never changed in place" if version == 0 else f"changed in place {counted(version, 'time')}"
    )


def _graph(nodes: Sequence[GraphNode], starts: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """The graph in words."""
    operations = [node for node in nodes if node.kind == "operation"]
    if not operations:
        return
    found, size = _leaves(nodes), sum(node.bytes for node in nodes)
    leaves = "1 leaf" if len(found) == 1 else f"{len(found):,} leaves"
    to = f" back to {leaves}: {listed(list(found), _SHOWN)}" if found else ""
    yield "graph", f"{counted(len(operations), 'operation')}{to}"
    freed = any(is_freed(node) for node in behind(starts))
    yield (
        "holds",
        f"{sized(size)} for backward"
        + ("; a backward has freed the rest, and another one raises" if freed else ""),
    )


def _leaves(nodes: Sequence[GraphNode]) -> tuple[str, ...]:
    return tuple(
        node.leaf or f"{list(node.shape or ())}" for node in nodes if node.kind != "operation"
    )


def _taken(nodes: Sequence[GraphNode]) -> str:
    taken = [_named(nodes[number]) for number in nodes[-1].takes]
    return listed(taken, _SHOWN) if taken else "nothing: it passes no gradient on"


def _named(node: GraphNode) -> str:
    if node.kind == "operation":
        return f"{node.name} #{node.number}"
    return f"{node.name} of {node.leaf or list(node.shape or ())}"


def _saved(node: GraphNode, *, freed: bool) -> str:
    if freed:
        return "nothing any more: a backward has freed it"
    shown = [
        f"{field.name} {'packed' if field.shape is None else list(field.shape)}"
        for field in node.saved
    ]
    return f"{listed(shown, _SHOWN)}; {sized(node.bytes)} held by it first" if shown else "nothing"


def _in_graph(nodes: Sequence[GraphNode], on_root: tuple[str, ...]) -> Iterator[HookEntry]:
    """Yield the hooks in a graph, without the audited object's own, which are of certain kinds on the last node."""
    for node in nodes:
        orders: dict[str, int] = {}
        for hook in node.hooks:
            order = orders[hook.kind] = orders.get(hook.kind, -1) + 1
            if node is not nodes[-1] or hook.kind not in on_root:
                yield _entry(hook, node, order)


def _entry(hook: GraphHook, node: GraphNode, order: int) -> HookEntry:
    at_leaf = hook.kind in ("tensor", "accumulated") and node.kind != "operation"
    path = (node.leaf or f"a leaf {list(node.shape or ())}") if at_leaf else _named(node)
    notes = () if hook.kind != "tensor" or at_leaf else ("on its result",)
    source = hook.owner if ":" in hook.owner else ""
    return HookEntry(_KINDS[hook.kind], path, "", order, hook.name, hook.owner, source, notes, ())
