"""Tensors, parameters and nodes that exist before the program runs: hooks for their gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle, unserializable_hook

from kedge.errors import EditError, NoSiteMatched, NoSuchKind, PartialGradient, warn
from kedge.flow import Event
from kedge.hooks.firing.fire import fire
from kedge.hooks.firing.measuring import measure_passing
from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.firing.tap import Counts, Spec, Tap
from kedge.hooks.placing.installed import InstalledHook
from kedge.hooks.placing.leaf_hooks import InstalledLeafHook, LeafHook, next_hook
from kedge.sites.language import Term
from kedge.sites.select import Selector, SitePlace
from kedge.sites.site import NODE_KINDS, TENSOR_KINDS, Site
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import in_backward, leaf_in_backward
from kedge.torch_internals.hook_tables import (
    after_accumulation,
    content_of,
    hook_gradient,
    on_tensor,
)
from kedge.torch_internals.own_work import OwnWork, is_watched, own_work


class TensorGate:
    """The taps of one session on one tensor, parameter or node that exists before the program runs."""

    def __init__(self, owner: Owner, name: str, kind: str) -> None:
        self.owner = owner
        self.site = Site(name, kind)
        self.taps: tuple[Tap, ...] = ()
        self.measures = self.edits = False
        self.param: Tensor | None = None
        self.emptied = False  # another hook had set ``.grad`` to None
        self.hook: LeafHook | None = None  # of a parameter
        self.parts: GradientParts | None = None  # of a leaf

    def event(self, leaf: str = "") -> Event:
        """Return the event of a gradient that belongs to no module's call."""
        clock = self.owner.clock
        pass_ = -1
        micro_batch = 0
        replica = ""
        if clock.leader is not None:
            here = clock.leader.here
            pass_ = here.pass_
            micro_batch = here.micro_batch
            replica = here.replica
        site = self.site
        if leaf:
            site = site.at(leaf)
        return Event(
            site,
            0,
            pass_,
            clock.backwards.now(),
            clock.step,
            micro_batch,
            clock.rank,
            replica,
            recompute=False,
        )

    @property
    def whose(self) -> int:
        """An id that separates this tensor's sites from those of another of the same name."""
        if self.param is None:
            return id(self)
        return id(self.param)

    def is_last(self, table: Mapping[int, Any] | None) -> bool:
        """Whether this gate's hook is the tensor's last.

        After others, a new gate is needed to keep the order.
        """
        return self.hook is None or next(reversed(table or {}), None) == self.hook.handle.id

    def attach(self, spec: Spec, site: Site) -> None:
        """Add a tap for each action at a site, after the others."""
        for tap in spec.make(site):
            tap.gate = self
            tap.since = self.counts()
            self.taps += (tap,)
        self.retime()

    def counts(self) -> Counts:
        """Return what has passed so far.

        A tensor belongs to no call and no forward pass.
        """
        clock = self.owner.clock
        during: Literal["", "backward"] = "backward" if in_backward() else ""
        return Counts(clock.step, 0, 0, clock.backwards.count, during)

    def retime(self) -> None:
        """Update whether all taps only measure, and whether any may edit.

        Schedules are checked when a gradient arrives.
        """
        self.measures = all(tap.measure is not None for tap in self.taps)
        self.edits = any(not tap.observes for tap in self.taps)

    def drop(self, tap: Tap) -> None:
        """Remove a tap; an event that is firing keeps the old tuple."""
        self.taps = tuple(t for t in self.taps if t is not tap)
        self.retime()

    def fire(self, value: Tensor | None, leaf: str = "") -> Tensor | None:
        """Run the taps; return the value's replacement or None.

        PyTorch passes None for an unused output.
        """
        if is_watched():
            with OwnWork():
                return self.fire(value, leaf)
        taps = self.taps
        if value is None or not any(tap.on for tap in taps):
            return None
        clock = self.owner.clock
        number = clock.backwards.now()  # counts this backward pass
        if self.parts is not None:
            if number == self.parts.backward:
                return self.parts.add(self, value)
            self.parts.begin(self, number, value)
        if self.measures:
            start = perf_counter()
            measure_passing(taps, value, self.owner, self.event, (leaf,))
            self.owner.measuring += perf_counter() - start
            return None
        new = fire(taps, value, self.event(leaf))
        if self.parts is not None:
            self.parts.passed_on(value, new)
        if new is value:
            return None
        return new


class GradientParts:
    """The parts in which the gradient of a leaf arrives within one backward pass of the program.

    # Note [A gradient in parts]
    A reentrant checkpoint differentiates its block by a backward pass of its own, so a parameter
    that is used inside and outside of one, or in several, gets its gradient in parts, each of which
    PyTorch adds to ``.grad`` and passes to hooks. The actions see the sum of the parts so far: what
    they kept of an earlier sum is withdrawn, and where they edit, the difference to the edit of the
    earlier sum is passed on, so that the parts add up to the edit of the whole. The first part is
    kept only where others are expected; where they were not, it is read from ``.grad``, if that was
    empty before.

    Args:
        leaf: Returns the tensor while its gradient arrives.
        accumulated: Whether its values are those of ``.grad`` and not the parts.

    Attributes:
        backward: The number of the newest backward pass that it had a gradient in.
        expected: Whether it was in parts before.
    """

    def __init__(self, leaf: Callable[[], Tensor | None], *, accumulated: bool) -> None:
        self.leaf = leaf
        self.accumulated = accumulated
        self.backward = -1
        self.expected = False
        self._began_empty = self._edited = False
        self._sum: Tensor | None = None
        self._passed: Tensor | None = None

    def begin(self, gate: TensorGate, number: int, first: Tensor) -> None:
        """Begin a backward pass, with its first part."""
        leaf = self.leaf()
        self.backward = number
        self._began_empty = leaf is not None and leaf.grad is None
        self._edited = False
        self._sum = None
        self._passed = None
        if self.accumulated:
            return
        if self.expected or (gate.edits and gate.owner.clock.backwards.may_nest()):
            self._sum = first

    def passed_on(self, given: Tensor, new: Tensor) -> None:
        """Note what was passed on for the first part."""
        self._edited = new is not given
        if self._sum is not None:
            self._passed = new

    def add(self, gate: TensorGate, part: Tensor) -> Tensor | None:
        """Fire with the sum of the parts so far; return what replaces the part, or None.

        Raises:
            EditError: If an action edits, and the part before was not kept.
        """
        event = gate.event()
        before = None
        if not self.accumulated:
            before = self._before(gate, event.site)
        whole = part
        if before is not None:
            whole = before + part

        if before is not None or self.accumulated:
            for tap in gate.taps:
                withdraw = getattr(tap.action, "withdraw", None)
                if tap.on and withdraw is not None:
                    withdraw(tap.site)
        new = fire(gate.taps, whole, event)
        replacing = new if new is not whole else None

        if self.accumulated:
            return replacing
        self.expected = True
        if before is None:
            self._sum = None
            self._passed = None
            return replacing
        if replacing is None and not self._edited:
            self._sum = whole
            self._passed = whole
            return None
        passed = before
        if self._passed is not None:
            passed = self._passed
        self._sum = whole
        self._passed = new
        self._edited = True
        return new - passed

    def _before(self, gate: TensorGate, site: Site) -> Tensor | None:
        """Return the sum of the parts before; None if it is not known."""
        if self._sum is not None:
            return self._sum
        leaf = self.leaf()
        if self._edited:
            raise EditError(
                f"the gradient at {site} arrives in parts, because a reentrant "
                "checkpoint uses it too, and the first part was edited before that "
                "was seen; use checkpoint(..., use_reentrant=False), or edit "
                ":param.acc"
            )
        if self._began_empty and leaf is not None and leaf.grad is not None:
            return leaf.grad
        if not self.expected:
            warn(
                PartialGradient(
                    f"{site} is a part of this gradient: it arrives in parts, "
                    "because a reentrant checkpoint uses the tensor too, and .grad "
                    "was not empty before. From the next backward on the values are "
                    "whole; checkpoint(..., use_reentrant=False) has no parts"
                )
            )
        return None


def _accumulated(gate: TensorGate) -> Callable[[Tensor], None]:
    """Return a hook that fires with ``.grad`` of a leaf tensor once a backward pass has accumulated into it."""

    def accumulated(leaf: Tensor) -> None:
        with own_work():
            gate.emptied = gate.emptied or leaf.grad is None
            if leaf.grad is not None and (new := gate.fire(leaf.grad)) is not None:
                leaf.grad = new

    return accumulated


def _hook_node(gate: TensorGate, node: Node) -> RemovableHandle:
    """Fire with each gradient that arrives at a node (``pre``) or leaves it (``post``)."""

    def each(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        passed = list(grads)
        changed = False
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            new = gate.fire(grad, str(i))
            if new is not None:
                passed[i] = new
                changed = True
        return tuple(passed) if changed else None

    def after(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> Any:
        if grad_inputs:
            return each(grad_inputs)
        # The node of a leaf accumulates its gradient and passes nothing on.
        if each(grad_outputs) is not None:
            raise EditError(
                f"an action returned a value at {gate.site}, but {gate.site.path} "
                "passes no gradient on; edit it at :pre"
            )
        return None

    if gate.site.kind == "pre":
        return node.register_prehook(each)
    return node.register_hook(after)


def _hook(gate: TensorGate, leaf: Tensor) -> LeafHook:
    """Fire with a leaf's gradient before its accumulation, or with ``.grad`` after it, by the gate's kind."""
    if gate.site.kind in ACCUMULATED:
        return LeafHook(leaf, _accumulated(gate), accumulated=True)
    return LeafHook(leaf, gate.fire, accumulated=False)


ACCUMULATED = ("acc", "param.acc")


@dataclass
class ParameterGates:
    """The gates of one session on the parameters of one model, by the parameter's id and the kind.

    Attributes:
        owner: The session.
        passes: Counts the model's forward passes.
        gates: The gates.
    """

    owner: Owner
    passes: PassCounter
    gates: dict[tuple[int, str], TensorGate] = field(default_factory=dict)
    _hooks: list[tuple[Tensor, LeafHook]] = field(default_factory=list)
    _since: int = 0

    def renew(self) -> None:
        """Hook the parameters again that the program has swapped.

        Called when a forward pass begins.
        """
        if not self._hooks:
            return
        with own_work():
            param, first = self._hooks[0]
            renewed = first.renew(param, self._since)  # this looks closer
            if renewed or any(content_of(param) != hook.content for param, hook in self._hooks):
                for param, hook in self._hooks:
                    hook.renew(param, self._since)
            self._since = next_hook()

    def place(self, place: SitePlace, spec: Spec) -> None:
        """Attach taps to the gradient of a parameter.

        Raises:
            NoSuchKind: If the parameter has no shape yet.
        """
        param = place.param
        kind = place.site.kind
        if param is None:
            return
        if is_lazy(param):
            raise NoSuchKind(
                f'"{place.site}": this parameter has no shape before the first '
                "forward, and until then its gradient cannot be hooked; call the "
                "model once before hooking"
            )
        gate = self.gates.get((id(param), kind))
        table = after_accumulation(param) if kind in ACCUMULATED else on_tensor(param)
        if gate is None or not gate.is_last(table):
            gate = TensorGate(self.owner, place.site.path, kind)
            gate.param = param
            gate.parts = GradientParts(lambda: param, accumulated=kind in ACCUMULATED)
            self.owner.installed.enter(self.gates, (id(param), kind), gate)
            if param.requires_grad:
                gate.hook = _hook(gate, param)
                self.owner.installed.install(InstalledLeafHook(gate.hook, param))
                self._hooks.append((param, gate.hook))
                self.owner.installed.on_failure(self._hooks.pop)
                self.passes.begun.beginning = self.renew
        gate.attach(spec, place.site)


def place_tensor(
    owner: Owner, name: str, tensor: Any, selector: Selector | None, spec: Spec
) -> None:
    """Attach taps to the gradient of a tensor.

    Raises:
        NoSiteMatched: If it is not a tensor.
        NoSuchKind: If it has no such gradient.
    """
    if not isinstance(tensor, Tensor):
        found = type(tensor).__name__
        raise NoSiteMatched(f'"{name}" is a {found}; a target dict maps names to tensors')
    for kind, _ in _kinds(selector, name, TENSOR_KINDS, "grad"):
        if not tensor.requires_grad:
            raise NoSuchKind(
                f'"{name}" does not require grad, so it has no gradient to hook; '
                "call requires_grad_() on it first"
            )
        if kind == "acc" and not tensor.is_leaf:
            made_by = tensor.grad_fn.name() if tensor.grad_fn else "an operation"
            raise NoSuchKind(
                f'"{name}:acc" is .grad after accumulation, but {name} is not a '
                f"leaf: it was made by {made_by} and accumulates nothing; use "
                f'"{name}:grad"'
            )
        gate = TensorGate(owner, name, kind)
        if tensor.is_leaf:
            gate.parts = GradientParts(leaf_in_backward, accumulated=kind in ACCUMULATED)
            handle = _hook(gate, tensor).handle
        else:
            handle = hook_gradient(tensor, gate.fire)
        owner.installed.install(InstalledHook(handle))
        gate.attach(spec, Site(name, kind))


def place_node(
    owner: Owner, target: Node | GradientEdge, selector: Selector | None, spec: Spec
) -> None:
    """Attach taps to the gradients that arrive at an autograd node or leave it."""
    number = None
    if isinstance(target, GradientEdge):
        node = target.node
        number = str(target.output_nr)
    else:
        node = target
    name = re.sub(r"^torch::autograd::", "", node.name())
    for kind, named in _kinds(selector, name, NODE_KINDS, "pre"):
        leaf = named
        if not leaf and kind == "pre":
            leaf = number
        gate = TensorGate(owner, name, kind)
        owner.installed.install(InstalledHook(_hook_node(gate, node)))
        gate.attach(spec, Site(name, kind, leaf or None))


def means(term: Term, name: str) -> bool:
    """Whether a term of a selector matches a target of this name that is not a model."""
    return not term.path or term.matches(name, ())


def _kinds(
    selector: Selector | None, name: str, allowed: tuple[str, ...], default: str
) -> list[tuple[str, str | None]]:
    """Return the kinds and leaves that a selector names for a target that is not a model."""
    if selector is None:
        return [(default, None)]
    wanted = [term for term in selector.terms if means(term, name)]
    for term in wanted:
        if (term.kind or default) not in allowed:
            has = ", ".join(f":{kind}" for kind in allowed)
            raise NoSuchKind(f'"{term}": {name} has no :{term.kind}; it has {has}')
    return [(term.kind or default, term.leaf) for term in wanted]


unserializable_hook(TensorGate.fire)
untraced(TensorGate.fire, GradientParts.add, _accumulated, _hook_node)
