"""One backward pass of a program of tensors: its graph, and the gradients that arrive at each node.

# Note [Gradients at nodes]
While a pass runs, each node of its graph has a hook that sees the gradient of the node's result,
after the hooks on that tensor. It returns nothing and goes with the end of the pass. A tensor that
`torch.autograd.grad` is asked about has a hook itself: the node of it need not run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch.autograd.graph import Node

from kedge.frames import SourceLine
from kedge.inspection.autograd_graph import nodes_behind, read_graph
from kedge.sites.operation_names import plain_name
from kedge.store.events import (
    SavedForBackward,
    TensorGraphEvent,
    TensorHook,
    TensorNode,
    TensorValue,
)
from kedge.torch_internals import modes
from kedge.torch_internals.autograd_nodes import is_leaf, operation_of, sequence_number
from kedge.torch_internals.graph_task import at_end_of_backward
from kedge.torch_internals.own_work import own_work
from kedge.watch.alone.hooks_seen import HookCalls, SeenHook
from kedge.watch.alone.values import value_of

MOST_NODES = 300
"""Most nodes of a graph that is recorded."""


@dataclass(frozen=True, slots=True)
class NotedConstant:
    """A tensor without a gradient that an operation took."""

    tensor: weakref.ref[Tensor]
    value: TensorValue

    @property
    def identity(self) -> int:
        """A number that no other constant has at the same time."""
        tensor = self.tensor()
        return id(self.tensor if tensor is None else tensor)


@dataclass(frozen=True, slots=True)
class NotedOperation:
    """An operation with a node in autograd's graph.

    Attributes:
        source: The program's line.
        value: Its result.
        result: The tensor, as long as it exists.
        constants: What it took besides tensors with a gradient.
    """

    source: SourceLine | None
    value: TensorValue | None
    result: weakref.ref[Tensor] | None
    constants: tuple[NotedConstant, ...]


@dataclass
class DraftNode:
    """A node of a graph, to be completed by its passes."""

    kind: Literal["operation", "leaf", "constant"]
    name: str
    takes: list[int]
    key: Hashable = None
    variable: str = ""
    source: SourceLine | None = None
    value: TensorValue | None = None
    last: TensorValue | None = None
    gradient: TensorValue | None = None
    last_gradient: TensorValue | None = None
    kept: TensorValue | None = None
    saved: tuple[SavedForBackward, ...] = ()

    def saw(self, value: TensorValue | None, *, again: bool) -> None:
        """Note what the tensor is in a pass."""
        if not again:
            self.value = value
        elif value is not None:
            self.last = value

    def got(self, gradient: TensorValue, *, again: bool) -> None:
        """Note its gradient in a pass."""
        if again:
            self.last_gradient = gradient
        else:
            self.gradient = gradient

    def finished(self) -> TensorNode:
        """Return the node for the recording."""
        return TensorNode(
            kind=self.kind,
            name=self.name,
            variable=self.variable,
            takes=tuple(self.takes),
            source=self.source,
            value=self.value,
            last=self.last,
            gradient=self.gradient,
            last_gradient=self.last_gradient,
            kept=self.kept,
            saved=self.saved,
        )


@dataclass
class TensorGraph:
    """The graph of passes that are alike.

    Attributes:
        began: What made it.
        first: Which pass was the first one.
        source: The program's line that called backward.
        nodes: Its nodes.
        roots: The places of the tensors at which it began.
    """

    began: Literal["backward", "grad", "forward"]
    first: int = 0
    source: SourceLine | None = None
    passes: int = 0
    failed: int = 0
    nodes: list[DraftNode] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    left_out: int = 0

    def finished(self, hooks: Iterable[SeenHook]) -> TensorGraphEvent:
        """Return the event for the recording, with those of some hooks that are on its nodes."""
        places = {node.key: place for place, node in enumerate(self.nodes) if node.key is not None}
        own = []
        for hook in hooks:
            calls = hook.calls.get(self.first)
            is_called_elsewhere = calls is None and bool(hook.calls)
            if hook.on not in places or is_called_elsewhere:
                continue
            calls = calls or HookCalls()
            own.append(
                TensorHook(
                    node=places[hook.on],
                    kind=hook.kind,
                    name=hook.name,
                    owner=hook.owner,
                    times=calls.times,
                    firings=tuple(calls.firings),
                    removed=hook.removed,
                )
            )
        return TensorGraphEvent(
            began=self.began,
            first=self.first,
            passes=self.passes,
            failed=self.failed,
            roots=tuple(self.roots),
            source=self.source,
            nodes=tuple(node.finished() for node in self.nodes),
            hooks=tuple(own),
            left_out=self.left_out,
        )


class GraphBehind:
    """The autograd graph behind the tensors at which a pass begins.

    Attributes:
        nodes: Its nodes, leaves first.
        leaves: The leaves of its first nodes.
        shape: What makes another pass alike.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.nodes: list[Node] = nodes_behind(tensors)
        places = {node: place for place, node in enumerate(self.nodes)}
        self.places = places
        takes = []
        for node in self.nodes:
            before = [places[each] for each, _ in node.next_functions if each is not None]
            takes.append(tuple(before))
        self.takes = takes
        names = tuple(node.name() for node in self.nodes)
        self.shape: Hashable = (names, tuple(takes))
        self.leaves: list[Tensor] = [
            node.variable  # type: ignore[attr-defined]
            for node in self.nodes
            if is_leaf(node)
        ]

    def place_of(self, tensor: Tensor) -> int | None:
        """Return the place of the node that has made a tensor, or accumulates its gradient."""
        if tensor.grad_fn is not None:
            return self.places.get(tensor.grad_fn)
        for place, node in enumerate(self.nodes):
            if getattr(node, "variable", None) is tensor:
                return place
        return None


def key_of(node: Node) -> Hashable:
    """Return what names a node as long as its graph exists."""
    if is_leaf(node):
        return leaf_key(node.variable)  # type: ignore[attr-defined]
    return sequence_number(node)


def leaf_key(leaf: Tensor) -> Hashable:
    """Return what names a leaf as long as it exists."""
    return "leaf", id(leaf)


def drafted(
    behind: GraphBehind,
    graph: TensorGraph,
    seen: Mapping[int, NotedOperation],
    names: Sequence[tuple[str, Tensor]],
    made: Mapping[Tensor, SourceLine | None],
    *,
    saved: bool,
) -> None:
    """Fill a graph with the nodes of its first pass; constants stand between leaves and operations.

    Args:
        behind: Autograd's graph.
        graph: Receives the nodes.
        seen: The operations by the numbers of their nodes.
        names: The tensors that the program's variables hold.
        made: The lines where tensors were made.
        saved: Whether to note what the operations keep for backward.
    """
    by_node: dict[Node, str] = {}
    by_id: dict[int, str] = {}
    for name, tensor in names:
        by_id.setdefault(id(tensor), name)
        maker = maker_of(tensor)
        if maker is not None and tensor.output_nr == 0:
            by_node.setdefault(maker, name)

    constants: dict[int, int] = {}
    moved: list[int] = []
    for leaf in behind.leaves:
        moved.append(len(graph.nodes))
        draft = DraftNode("leaf", "leaf", [], leaf_key(leaf), by_id.get(id(leaf), ""))
        draft.source = made.get(leaf)
        graph.nodes.append(draft)
    operations = behind.nodes[len(moved) :]
    for node in operations:
        known = seen.get(sequence_number(node))
        for constant in known.constants if known is not None else ():
            at = constant.identity
            if at not in constants:
                constants[at] = len(graph.nodes)
                name = ""
                if constant.tensor() is not None:
                    name = by_id.get(at, "")
                graph.nodes.append(
                    DraftNode("constant", "constant", [], None, name, value=constant.value)
                )
    for number, node in enumerate(operations, len(moved)):
        moved.append(len(graph.nodes))
        takes = [moved[each] for each in behind.takes[number]]
        known = seen.get(sequence_number(node))
        draft = DraftNode("operation", _name(node), takes, key_of(node), by_node.get(node, ""))
        if known is not None:
            draft.source = known.source
            takes += [constants[constant.identity] for constant in known.constants]
        draft.takes = list(dict.fromkeys(takes))
        graph.nodes.append(draft)
    graph.roots = [
        moved[place] for place in map(behind.place_of, behind.tensors) if place is not None
    ]
    if saved:
        for described, place in zip(read_graph(behind.tensors), moved, strict=True):
            graph.nodes[place].saved = tuple(
                SavedForBackward(name=one.name, shape=one.shape, bytes=one.bytes)
                for one in described.saved
            )


def maker_of(tensor: Tensor) -> Node | None:
    """Return the node that made a tensor; None for a leaf, and for a view whose history is lost."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def _name(node: Node) -> str:
    return operation_of(node) if "Backward" not in node.name() else plain_name(node.name())


class GradientPass:
    """A pass that is under way; see Note [Gradients at nodes].

    Args:
        graph: Receives what is seen.
        behind: Autograd's graph of this pass.
        seen: The operations by the numbers of their nodes.
        again: Whether there was a pass of this graph before.
        asked: The tensors whose gradients the pass returns.
        ended: Called at the end of the pass.
        attempt: Runs work that must not end the program.

    Attributes:
        tensors: The identities of the tensors that it begins at.
        has_begun: Whether a gradient has arrived anywhere.
    """

    def __init__(
        self,
        graph: TensorGraph,
        behind: GraphBehind,
        seen: Mapping[int, NotedOperation],
        *,
        again: bool,
        asked: Sequence[Tensor],
        ended: Callable[[], None],
        attempt: Callable[..., Any],
    ) -> None:
        self.graph = graph
        self.again = again
        self.ended = ended
        self.attempt = attempt
        self.tensors = [id(tensor) for tensor in behind.tensors]
        self.has_begun = False
        self._handles: list[Any] = []
        self._kept: list[tuple[DraftNode, Tensor | weakref.ref[Tensor]]] = []
        drafts = [node for node in graph.nodes if node.kind != "constant"]
        for node, draft in zip(behind.nodes, drafts, strict=True):
            draft.key = key_of(node)
            known = None
            if not is_leaf(node):
                known = seen.get(sequence_number(node))
            if known is not None:
                draft.saw(known.value, again=again)
                if known.result is not None:
                    self._kept.append((draft, known.result))
            self._handles.append(node.register_prehook(self._watching(draft)))
        for leaf, draft in zip(behind.leaves, drafts, strict=False):
            draft.saw(value_of(leaf), again=again)
            self._kept.append((draft, leaf))
        for tensor in asked:
            place = behind.place_of(tensor)
            if place is not None:
                self._handles.append(tensor.register_hook(self._watching(drafts[place])))

    def _watching(self, draft: DraftNode) -> Callable[[Any], None]:
        def arrived(gradients: Any) -> None:
            with own_work(), modes.without_subclasses():
                self.attempt("the gradients of its tensors", self._arrived, draft, gradients)

        return arrived

    def _arrived(self, draft: DraftNode, gradients: Any) -> None:
        self.await_end()
        if isinstance(gradients, Tensor):
            gradients = (gradients,)
        gradient = next((each for each in gradients if isinstance(each, Tensor)), None)
        if gradient is not None:
            draft.got(value_of(gradient), again=self.again)

    def starts_with(self, gradients: Sequence[Any]) -> None:
        """Note the gradients that the program gives for the tensors at which the pass begins."""
        for place, gradient in zip(self.graph.roots, gradients, strict=False):
            if isinstance(gradient, Tensor):
                self.graph.nodes[place].got(value_of(gradient), again=self.again)

    def await_end(self) -> None:
        """Ask autograd to tell when this pass ends, from inside of it."""
        if not self.has_begun:
            self.has_begun = at_end_of_backward(self.ended)

    def close(self, *, failed: bool) -> None:
        """Take the hooks out, and read what the pass has left."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.graph.passes += 1
        self.graph.failed += failed
        for draft, held in self._kept:
            tensor: Tensor | None = held() if isinstance(held, weakref.ref) else held
            if tensor is None or not (tensor.is_leaf or tensor.retains_grad):
                continue
            if tensor.grad is not None:
                draft.kept = value_of(tensor.grad)
        self._kept.clear()
