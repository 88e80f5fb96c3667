"""Gradients: hooks on tensors, parameters and autograd nodes.

# Note [No full backward hooks]
PyTorch's module backward hooks put an identity node around a module, which changes the bits of
gradients, forbids in-place operations after it, and is silent for lists, dicts and dataclasses.
A hook on the tensor itself has none of these faults: set when the forward has just made the
tensor, it stays on the operation that made it even if the next one works in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from kedge.errors import EditError
from kedge.flow import Event
from kedge.hooks.dynamo import untraced
from kedge.hooks.firing import fire
from kedge.hooks.tap import Tap
from kedge.sites.site import Site

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from kedge.hooks.modules import Gate
    from kedge.hooks.schedule import Clock
    from kedge.hooks.session import Session


class Station:
    """The taps of one session on one tensor, parameter or node that exists before the program runs."""

    def __init__(self, session: Session, name: str, kind: str) -> None:
        self.session, self.site = session, Site(name, kind)
        self.taps: tuple[Tap, ...] = ()
        self.param: Tensor | None = None
        self.handle: RemovableHandle | None = None

    def event(self, leaf: str = "") -> Event:
        """Make the event of a gradient that belongs to no module's call."""
        clock = self.session.clock
        here = self.session.main_passes.here if self.session.main_passes else None
        pass_, micro, replica = (here.pass_, here.micro_batch, here.replica) if here else (-1, 0, "")
        site = self.site.at(leaf) if leaf else self.site
        return Event(site, 0, pass_, clock.backward(), clock.step, micro, clock.rank, replica, recompute=False)

    @property
    def whose(self) -> int:
        """Tells the sites of one tensor from those of another of the same name."""
        return id(self) if self.param is None else id(self.param)

    def is_last(self, table: Mapping[int, Any] | None) -> bool:
        """Whether nobody has hooked the tensor since; behind others a new station is needed to keep the order."""
        return self.handle is None or next(reversed(table or {}), None) == self.handle.id

    def retime(self) -> None:
        """Nothing to prepare: whether a tap is on schedule is looked up when a gradient arrives."""

    def drop(self, tap: Tap) -> None:
        """Let a tap go; a firing under way still sees the old tuple."""
        self.taps = tuple(t for t in self.taps if t is not tap)

    def fire(self, value: Tensor, leaf: str = "") -> Tensor | None:
        """Run the taps; return what replaces the value, None for nothing."""
        if not any(tap.on for tap in self.taps):
            return None
        new = fire(self.taps, value, self.event(leaf))
        return None if new is value else new


def attach_tensor(station: Station, tensor: Tensor) -> RemovableHandle:
    """Fire with the gradient of a tensor, before it is accumulated."""
    handle: RemovableHandle = tensor.register_hook(station.fire)
    return handle


def attach_accumulated(station: Station, tensor: Tensor) -> RemovableHandle:
    """Fire with ``.grad`` of a leaf tensor once a backward pass has accumulated into it."""

    def accumulated(leaf: Tensor) -> None:
        if leaf.grad is not None and (new := station.fire(leaf.grad)) is not None:
            leaf.grad = new

    handle: RemovableHandle = tensor.register_post_accumulate_grad_hook(accumulated)
    return handle


def attach_node(station: Station, node: Node) -> RemovableHandle:
    """Fire with each gradient that arrives at a node (``pre``) or leaves it (``post``)."""

    def each(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        new = [None if g is None else station.fire(g, str(i)) for i, g in enumerate(grads)]
        if all(n is None for n in new):
            return None
        return tuple(g if n is None else n for g, n in zip(grads, new, strict=True))

    def after(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> Any:
        if grad_inputs:
            return each(grad_inputs)
        if each(grad_outputs) is not None:  # the node of a leaf keeps what arrives and passes nothing on
            raise EditError(
                f"a value was returned at {station.site}, but {station.site.path} passes no gradient on; edit it at :pre"
            )
        return None

    return node.register_prehook(each) if station.site.kind == "pre" else node.register_hook(after)


class Listener:
    """Fires the taps of one gate with the gradient of one tensor."""

    def __init__(self, gate: Gate, origin: Event) -> None:
        self.gate, self.origin = gate, origin

    def __call__(self, grad: Tensor) -> Tensor | None:
        """Be the tensor's hook."""
        now = self.gate.taps[self.origin.site.kind]
        if not any(tap.on for tap in now):
            return None
        new = fire(now, grad, gradient_event(self.origin, self.gate.session.clock))
        return None if new is grad else new

    def hears(self, gate: Gate, origin: Event) -> bool:
        """Whether this is the one that another call of the same place would set again."""
        ours = self.origin
        return self.gate is gate and (ours.site, ours.call) == (origin.site, origin.call)


def gradient_event(origin: Event, clock: Clock) -> Event:
    """Make the event of a gradient: the call and pass of its forward, the step and backward of now."""
    o = origin
    return Event(
        o.site,
        o.call,
        o.pass_,
        clock.backward(o.backward),
        clock.step,
        o.micro_batch,
        o.rank,
        o.replica,
        recompute=False,
    )


def listen(tensor: Tensor, gate: Gate, origin: Event) -> None:
    """Fire a gate's taps with the gradient of a tensor that a forward has made or was given.

    A tensor may live for several passes (an input that is used again, a parameter that a module
    returns), and a recompute meets the very inputs of its forward: each is listened to once, or an
    edit would be made again and again.

    Args:
        tensor: A tensor that requires grad.
        gate: Where the taps stand.
        origin: The forward's event.
    """
    for there in (tensor._backward_hooks or {}).values():
        if isinstance(there, Listener) and there.hears(gate, origin):
            there.origin = there.origin if origin.recompute else origin
            return
    gate.session.keep(tensor.register_hook(Listener(gate, origin)))


def edges_into(roots: Sequence[Tensor], target: Any) -> list[tuple[Node, list[int]]]:
    """Find the nodes between a call's outputs and its input that pass a gradient on to the input.

    # Note [The share of one call]
    A tensor's gradient is the sum over all its uses. What one module call contributes is what its
    own nodes send along the edges into the tensor's node. Walking back from the call's outputs
    finds them, with no identity node in the graph: such a node would change bits.

    Args:
        roots: The outputs of the call.
        target: The input's `torch.autograd.graph.GradientEdge`, taken before the call.

    Returns:
        Each node with the positions of its ``grad_inputs`` that go to the input.
    """
    stack = [t.grad_fn for t in roots if t.grad_fn is not None]
    seen, found = set(stack), []
    while stack:
        node = stack.pop()
        if node is None or node is target.node:
            continue
        positions = []
        for i, (behind, number) in enumerate(node.next_functions):
            if behind is target.node and number == target.output_nr:
                positions.append(i)
            elif behind is not None and behind not in seen:
                seen.add(behind)
                stack.append(behind)
        if positions:
            found.append((node, positions))
    return found


class Share:
    """Sums up what one call of a module adds to the gradient of one of its inputs."""

    def __init__(self, gate: Gate, origin: Event, nodes: int) -> None:
        self.gate, self.origin, self.nodes = gate, origin, nodes
        self.sums: dict[int, tuple[int, Tensor | None]] = {}

    def passed(self, positions: list[int], grad_inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """Take one node's part; with the last one the share is complete and fires."""
        event = gradient_event(self.origin, self.gate.session.clock)
        seen, total = self.sums.pop(event.backward, (0, None))
        for i in positions:
            part = grad_inputs[i]
            if part is not None:
                total = part if total is None else total + part
        if seen + 1 < self.nodes:
            self.sums[event.backward] = (seen + 1, total)
            return None
        new = total if total is None else fire(self.gate.taps["in.share"], total, event)
        if new is total:
            return None
        if self.nodes > 1 or len(positions) > 1:
            self._refuse()
        return tuple(new if i == positions[0] else g for i, g in enumerate(grad_inputs))

    def _refuse(self) -> None:
        raise EditError(
            f"an action returned a value at {self.origin.site}, but this call uses its input {self.nodes} times, so its share "
            "is known only when parts of it have gone on; edit :in.grad, the total, instead"
        )


def listen_share(share: Share, found: list[tuple[Node, list[int]]]) -> None:
    """Put the node hooks of a share in place; they go with the session or with the graph."""
    for node, positions in found:
        share.gate.session.keep(node.register_hook(lambda gi, go, p=positions: share.passed(p, gi)))


def edge_of(tensor: Tensor) -> Any:
    """Return a tensor's gradient edge, None if it has none."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None


untraced(Station.fire, Listener.__call__, Share.passed, attach_accumulated, attach_node, listen_share)
