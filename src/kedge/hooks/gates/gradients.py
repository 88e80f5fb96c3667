"""Gradients of a forward's inputs and outputs: hooks on the tensors, and on nodes of the graph.

# Note [No full backward hooks]
PyTorch's module backward hooks put an identity node around a module, which changes the bits of
gradients, forbids in-place operations after it, and is silent for lists, dicts and dataclasses.
A hook on the tensor itself has none of these faults: set right after the forward has made the
tensor, it stays on the operation that made it even if the next one works in place - unless the
tensor is a view, see Note [Gradients of views].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node

from kedge.errors import EditError
from kedge.flow import Event
from kedge.hooks.firing.fire import fire
from kedge.hooks.firing.gate import Found, Gate
from kedge.hooks.firing.measuring import measure_values
from kedge.hooks.firing.schedule import StepClock
from kedge.hooks.firing.tap import Tap
from kedge.hooks.firing.thread_position import ThreadPosition
from kedge.sites.site import Site
from kedge.torch_internals.aliases import MemoryVersion, whole
from kedge.torch_internals.checkpoint import is_cut, reentrant_around
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.hook_tables import hook_gradient, on_tensor
from kedge.torch_internals.modes import is_transforming
from kedge.torch_internals.own_work import OwnWork, is_watched, own_work
from kedge.torch_internals.tensors import base_of, may_alias

_NOTED = 8


def listen_each(gate: Gate, kind: str, found: Found, call: int, recompute: bool) -> None:
    """Set hooks for the gradients of the leaves that have one."""
    passes = gate.passes
    seen = gate.seen
    seen.rebuilt = seen.rebuilt or is_rebuilt(gate)
    if recompute and not passes.differentiates_again(seen.listened):
        return
    heard: dict[int, GradientListener] = {}
    for leaf, tensor in found:
        site = gate.site(kind, leaf)
        if not tensor.requires_grad:
            _note_ungraded(gate, tensor)
            continue
        if passes.is_heard((gate, site, call), recompute=recompute):
            continue
        seen.listened += not recompute
        event = passes.event(site, call, recompute)
        known = heard.get(id(tensor))
        if known is not None:
            known.also = {**known.also, site: event}
            continue
        listener = heard[id(tensor)] = listen(
            tensor, GradientListener(gate, event), recompute=recompute
        )
        if listener.pulse is not None:
            seen.pulses[kind] = listener.pulse


def is_rebuilt(gate: Gate) -> bool:
    """Whether the newest call at a gate ran in a reentrant checkpoint, whose forward builds no graph."""
    segment = gate.passes.here.segment
    return segment is not None and segment.reentrant


def measure_each(gate: Gate, kind: str, found: Found, call: int) -> None:
    """Set hooks that measure the gradients of the leaves that have one.

    See Note [Values alone].
    """
    here = gate.passes.here
    seen = gate.seen
    alone = len(found) == 1 or len({id(tensor) for _, tensor in found}) == len(found)
    if here.segment is not None or not alone:
        listen_each(gate, kind, found, call, recompute=False)
        return
    for leaf, tensor in found:
        if tensor.requires_grad:
            seen.listened += 1
            gate.site(kind, leaf)  # the first one is noted in the forward
            listener = listen(tensor, GradientMeasurer(gate, kind, leaf, call, here))
            if listener.pulse is not None:
                seen.pulses[kind] = listener.pulse
        else:
            _note_ungraded(gate, tensor)


def _note_ungraded(gate: Gate, tensor: Tensor) -> None:
    """Note what ruled out the gradient of a value that requires none, where the call shows that; of a few calls."""
    noted = gate.seen.ungraded
    if len(noted) == _NOTED:
        return
    if is_transforming():
        noted.append("transform")
    elif not (tensor.is_floating_point() or tensor.is_complex()):
        noted.append("whole numbers")
    elif torch.is_grad_enabled():
        noted.append("nothing trainable")
    elif (context := reentrant_around()) is not None:
        around = "cut checkpoint" if is_cut(context) else "checkpoint"
        noted.append(around)
    else:
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        if gate.passes.here.graded:
            mode += " inside"
        noted.append(mode)


class GradientListener:
    """Fires the taps of one gate with the gradient of one tensor."""

    __torch_unserializable__ = True  # a tensor is sent or saved without it, and without a warning

    def __init__(self, gate: Gate, origin: Event) -> None:
        self.gate = gate
        self.origin = origin
        self.also: Mapping[Site, Event] = {}  # other sites of this very tensor in the same call
        self.shape: torch.Size | None = None  # of the view, where the hook is on its base
        self.pulse: MemoryVersion | None = None

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        """The tensor's hook.

        PyTorch passes None for an unused output if other outputs of its node were used.
        """
        if is_watched():
            with OwnWork():
                return self(grad)
        now = self.gate.taps[self.origin.site.kind]
        if grad is None:
            self.gate.seen.unused.update(
                (site.kind, site.leaf or "") for site in (self.origin.site, *self.also)
            )
            return None
        if not any(tap.on for tap in now) or (self.pulse is not None and self.pulse.changed()):
            return None
        value = grad if self.shape is None else grad.reshape(self.shape)
        new = self._through(now, value)
        if new is value:
            return None
        return new.reshape(grad.shape)

    def _through(self, taps: Sequence[Tap], value: Tensor) -> Tensor:
        """Fire at every site of the tensor.

        An action that edits the gradient is not called at the sites after.
        """
        clock = self.gate.owner.clock
        if not self.also:
            return fire(taps, value, gradient_event(self.origin, clock))
        events = [gradient_event(origin, clock) for origin in (self.origin, *self.also.values())]
        for tap in taps:
            given = value
            for event in events:
                if value is given:
                    value = fire((tap,), given, event)
        return value

    @property
    def place(self) -> tuple[Site, int]:
        """The site and the call, which identify this listener among those of its gate."""
        return self.origin.site, self.origin.call


class GradientMeasurer(GradientListener):
    """Hands the gradient of one tensor to the taps that measure it.

    See Note [Values alone].
    """

    also: Mapping[Site, Event] = MappingProxyType({})
    shape: torch.Size | None = None
    pulse: MemoryVersion | None = None

    def __init__(self, gate: Gate, kind: str, leaf: str, call: int, here: ThreadPosition) -> None:
        self.gate = gate
        self.kind = kind
        self.leaf = leaf
        self.call = call
        self.pass_ = here.pass_
        self.micro_batch = here.micro_batch
        self.replica = here.replica

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        """The tensor's hook."""
        if is_watched():
            with OwnWork():
                return self(grad)
        gate = self.gate
        if not gate.measures or self.also:  # an action was attached since
            return super().__call__(grad)
        taps = gate.taps[self.kind]
        for tap in taps:
            if tap.on:
                break
        else:
            return None
        if grad is None:
            gate.seen.unused.add((self.kind, self.leaf))
            return None
        if self.pulse is not None and self.pulse.changed():
            return None
        start = perf_counter()
        owner = gate.owner
        clock = owner.clock
        number = clock.backwards.now()  # counts this backward pass
        value = grad if self.shape is None else grad.reshape(self.shape)
        step = clock.step
        found = [(self.leaf, value)]
        of = (self.kind, self.call, self.pass_, number, step, self.micro_batch, self.replica)
        measure_values(taps, found, step, owner.fired, gate.event_at, of)
        owner.measuring += perf_counter() - start
        return None

    @property
    def origin(self) -> Event:
        """The forward's event, built on access."""
        of = (self.kind, self.call, self.pass_, -1, -1, self.micro_batch, self.replica)
        return self.gate.event_at(self.leaf, *of)

    @origin.setter
    def origin(self, event: Event) -> None:
        self.kind = event.site.kind
        self.leaf = event.site.leaf or ""
        self.call = event.call
        self.pass_ = event.pass_
        self.micro_batch = event.micro_batch
        self.replica = event.replica

    @property
    def place(self) -> tuple[Site, int]:
        """The site and the call."""
        return self.gate.site(self.kind, self.leaf), self.call


def gradient_event(origin: Event, clock: StepClock) -> Event:
    """Return the event of a gradient: the call and pass of its forward, the current step and backward."""
    o = origin
    return Event(
        o.site,
        o.call,
        o.pass_,
        clock.backwards.now(o.backward),
        clock.step,
        o.micro_batch,
        o.rank,
        o.replica,
        recompute=False,
    )


def listen(
    tensor: Tensor, listener: GradientListener, *, recompute: bool = False
) -> GradientListener:
    """Fire a gate's taps with the gradient of an input or output of a forward.

    A tensor may live for several passes (an input that is used again, a parameter that a module
    returns), and a recompute has the very inputs of its forward: each tensor gets one listener for
    a place, because several would repeat an edit.

    Args:
        tensor: A tensor that requires grad.
        listener: The listener to set, unless the tensor has one for the same place.
        recompute: Whether a checkpoint's recompute passes the tensor.

    Returns:
        The listener in force; where its gradient may be unavailable, its `pulse` shows whether it
        is: see Note [Gradients of views].
    """
    aliased = may_alias(tensor)
    if aliased or on_tensor(tensor):
        known = _heard(tensor, listener)
        if known is not None:
            if not recompute:
                known.origin = listener.origin
                known.also = {}
            return known
    if aliased:
        base = whole(tensor)
        if base is not None:
            listener.shape = tensor.shape
        elif type(tensor) is Tensor:
            listener.pulse = MemoryVersion(tensor)
        hooked = base if base is not None else tensor
        handle = hook_gradient(hooked, listener)
    else:
        handle = tensor.register_hook(listener)
    listener.gate.owner.installed.keep(handle)
    return listener


def _heard(tensor: Tensor, like: GradientListener) -> GradientListener | None:
    for each in (tensor, base_of(tensor)):
        if each is None:
            continue
        for hook in (on_tensor(each) or {}).values():
            if not isinstance(hook, GradientListener) or hook.gate is not like.gate:
                continue
            if hook.place == like.place:
                return hook
    return None


def edges_into(
    roots: Sequence[Tensor], inputs: Mapping[str, Any]
) -> dict[str, list[tuple[Node, list[int]]]]:
    """Return the nodes of one call that pass a gradient on to its inputs.

    # Note [The share of one call]
    A tensor's gradient is the sum over all its uses. One module call contributes the gradients that
    its own nodes send along the edges into the tensor's node. Walking back from the call's outputs
    finds them without an identity node in the graph, which would change bits. The walk ends at
    every input: the nodes behind an input precede the call, even if they lead to another input,
    as in ``output(dense(x), x)``.

    Args:
        roots: The outputs of the call.
        inputs: Each input's `torch.autograd.graph.GradientEdge`, taken before the call; None
            without one.

    Returns:
        For each input, the nodes and the positions of their ``grad_inputs`` that go to it.
    """
    found: dict[str, list[tuple[Node, list[int]]]] = {leaf: [] for leaf in inputs}
    ends: dict[tuple[Any, int], list[str]] = {}
    for leaf, edge in inputs.items():
        if edge is not None:
            ends.setdefault((edge.node, edge.output_nr), []).append(leaf)
    stack = []
    for root in roots:
        node = root.grad_fn
        if node is not None and (node, root.output_nr) not in ends:
            stack.append(node)
    seen = set(stack)
    while stack:
        node = stack.pop()
        positions: dict[str, list[int]] = {}
        for i, (behind, number) in enumerate(node.next_functions):
            for leaf in ends.get((behind, number), ()):
                positions.setdefault(leaf, []).append(i)
            if behind is None or (behind, number) in ends or behind in seen:
                continue
            seen.add(behind)
            stack.append(behind)
        for leaf, at in positions.items():
            found[leaf].append((node, at))
    return found


class InputShare:
    """The sum of the gradients that one call of a module adds to the gradient of one of its inputs."""

    def __init__(self, gate: Gate, origin: Event, nodes: int) -> None:
        self.gate = gate
        self.origin = origin
        self.nodes = nodes
        self.sums: dict[int, tuple[int, Tensor | None]] = {}

    def passed(
        self, positions: list[int], grad_inputs: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...] | None:
        """Add one node's part; the last one completes the share and fires."""
        if is_watched():
            with OwnWork():
                return self.passed(positions, grad_inputs)
        event = gradient_event(self.origin, self.gate.owner.clock)
        seen, total = self.sums.pop(event.backward, (0, None))
        for i in positions:
            part = grad_inputs[i]
            if part is not None:
                total = part if total is None else total + part
        if seen + 1 < self.nodes:
            self.sums[event.backward] = (seen + 1, total)
            if not seen:
                # A node whose output is unused does not run: then the end of the backward completes
                # the share.
                Variable._execution_engine.queue_callback(lambda: self._complete(event))
            return None
        if total is None:
            return None
        new = fire(self.gate.taps["in.share"], total, event)
        if new is total:
            return None
        if self.nodes > 1 or len(positions) > 1:
            self._refuse()
        changed = list(grad_inputs)
        changed[positions[0]] = new
        return tuple(changed)

    def _complete(self, event: Event) -> None:
        total = self.sums.pop(event.backward, (0, None))[1]
        if total is None:
            return
        with own_work():
            new = fire(self.gate.taps["in.share"], total, event)
            if new is not total:
                self._refuse()

    def _refuse(self) -> None:
        raise EditError(
            f"an action returned a value at {self.origin.site}, but this call uses "
            f"its input {self.nodes} times, so its share is known only after parts "
            "of it were passed on; edit :in.grad, the total, instead"
        )


def listen_share(share: InputShare, found: list[tuple[Node, list[int]]]) -> None:
    """Register the node hooks of a share.

    They end with the session or with the graph.
    """
    for node, positions in found:
        share.gate.owner.installed.keep(
            node.register_hook(lambda gi, go, p=positions: share.passed(p, gi))
        )


untraced(GradientListener.__call__, GradientMeasurer.__call__, InputShare.passed, listen_share)
