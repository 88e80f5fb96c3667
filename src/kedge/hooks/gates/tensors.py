"""Tensors, parameters and nodes that exist before the program runs: hooks for their gradients."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle, unserializable_hook

from kedge.errors import EditError, NoSiteMatched, NoSuchKind
from kedge.flow import Event
from kedge.hooks.firing.fire import fire
from kedge.hooks.firing.measuring import measure_value
from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.tap import Counts, Spec, Tap
from kedge.hooks.placing.installed import InstalledHook
from kedge.sites.language import Term
from kedge.sites.select import Selector, SitePlace
from kedge.sites.site import NODE_KINDS, TENSOR_KINDS, Site
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.hook_tables import after_accumulation, hook_gradient, on_tensor
from kedge.torch_internals.own_work import OwnWork, is_watched, own_work


class TensorGate:
    """The taps of one session on one tensor, parameter or node that exists before the program runs."""

    def __init__(self, owner: Owner, name: str, kind: str) -> None:
        self.owner, self.site = owner, Site(name, kind)
        self.taps: tuple[Tap, ...] = ()
        self.measures = False
        self.param: Tensor | None = None
        self.emptied = False  # another hook had set ``.grad`` to None
        self.handle: RemovableHandle | None = None

    def event(self, leaf: str = "") -> Event:
        """Return the event of a gradient that belongs to no module's call."""
        clock = self.owner.clock
        here = clock.leader.here if clock.leader is not None else None
        pass_, micro, replica = (here.pass_, here.micro_batch, here.replica) if here else (-1, 0, "")
        site = self.site.at(leaf) if leaf else self.site
        return Event(site, 0, pass_, clock.backwards.now(), clock.step, micro, clock.rank, replica, recompute=False)

    @property
    def whose(self) -> int:
        """An id that separates this tensor's sites from those of another of the same name."""
        return id(self) if self.param is None else id(self.param)

    def is_last(self, table: Mapping[int, Any] | None) -> bool:
        """Whether this gate's hook is the tensor's last; after others, a new gate is needed to keep the order."""
        return self.handle is None or next(reversed(table or {}), None) == self.handle.id

    def attach(self, spec: Spec, site: Site) -> None:
        """Add a tap for each action at a site, after the others."""
        for tap in spec.make(site):
            tap.gate, tap.since = self, self.counts()
            self.taps += (tap,)
        self.retime()

    def counts(self) -> Counts:
        """Return what has passed so far; a tensor belongs to no call and no forward pass."""
        clock = self.owner.clock
        during: Literal["", "backward"] = "backward" if in_backward() else ""
        return Counts(clock.step, 0, 0, clock.backwards.count, during)

    def retime(self) -> None:
        """Update whether all taps only measure; schedules are checked when a gradient arrives."""
        self.measures = all(tap.measure is not None for tap in self.taps)

    def drop(self, tap: Tap) -> None:
        """Remove a tap; an event that is firing keeps the old tuple."""
        self.taps = tuple(t for t in self.taps if t is not tap)
        self.retime()

    def fire(self, value: Tensor | None, leaf: str = "") -> Tensor | None:
        """Run the taps; return the value's replacement or None. PyTorch passes None for an unused output."""
        if is_watched():
            with OwnWork():
                return self.fire(value, leaf)
        taps = self.taps
        if value is None or not any(tap.on for tap in taps):
            return None
        if self.measures:
            clock = self.owner.clock
            clock.backwards.now()  # counts this backward pass
            measure_value(taps, value, clock.step, self.owner.fired, self.event, (leaf,))
            return None
        new = fire(taps, value, self.event(leaf))
        return None if new is value else new


def _hook_accumulated(gate: TensorGate, tensor: Tensor) -> RemovableHandle:
    """Fire with ``.grad`` of a leaf tensor once a backward pass has accumulated into it."""

    def accumulated(leaf: Tensor) -> None:
        with own_work():
            gate.emptied = gate.emptied or leaf.grad is None
            if leaf.grad is not None and (new := gate.fire(leaf.grad)) is not None:
                leaf.grad = new

    handle: RemovableHandle = tensor.register_post_accumulate_grad_hook(accumulated)
    return handle


def _hook_node(gate: TensorGate, node: Node) -> RemovableHandle:
    """Fire with each gradient that arrives at a node (``pre``) or leaves it (``post``)."""

    def each(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        new = [None if g is None else gate.fire(g, str(i)) for i, g in enumerate(grads)]
        if all(n is None for n in new):
            return None
        return tuple(g if n is None else n for g, n in zip(grads, new, strict=True))

    def after(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> Any:
        if grad_inputs:
            return each(grad_inputs)
        if each(grad_outputs) is not None:  # the node of a leaf accumulates its gradient and passes nothing on
            raise EditError(
                f"an action returned a value at {gate.site}, but {gate.site.path} passes no gradient on; edit it at :pre"
            )
        return None

    return node.register_prehook(each) if gate.site.kind == "pre" else node.register_hook(after)


def _hook(gate: TensorGate, tensor: Tensor) -> RemovableHandle:
    """Fire with a tensor's gradient before its accumulation, or with ``.grad`` of a leaf after it, by the gate's kind."""
    return _hook_accumulated(gate, tensor) if gate.site.kind in ACCUMULATED else hook_gradient(tensor, gate.fire)


ACCUMULATED = ("acc", "param.acc")


@dataclass
class ParameterGates:
    """The gates of one session on the parameters of one model, by the parameter's id and the kind."""

    owner: Owner
    gates: dict[tuple[int, str], TensorGate] = field(default_factory=dict)

    def place(self, place: SitePlace, spec: Spec) -> None:
        """Attach taps to the gradient of a parameter.

        Raises:
            NoSuchKind: If the parameter has no shape yet.
        """
        param, kind = place.param, place.site.kind
        if param is None:
            return
        if is_lazy(param):
            raise NoSuchKind(
                f'"{place.site}": this parameter has no shape before the first forward, and until then its gradient '
                "cannot be hooked; call the model once before hooking"
            )
        gate = self.gates.get((id(param), kind))
        table = (after_accumulation if kind in ACCUMULATED else on_tensor)(param)
        if gate is None or not gate.is_last(table):
            gate = TensorGate(self.owner, place.site.path, kind)
            gate.param = param
            self.owner.installed.enter(self.gates, (id(param), kind), gate)
            if param.requires_grad:
                gate.handle = _hook(gate, param)
                self.owner.installed.install(InstalledHook(gate.handle))
        gate.attach(spec, place.site)


def place_tensor(owner: Owner, name: str, tensor: Any, selector: Selector | None, spec: Spec) -> None:
    """Attach taps to the gradient of a tensor.

    Raises:
        NoSiteMatched: If it is not a tensor.
        NoSuchKind: If it has no such gradient.
    """
    if not isinstance(tensor, Tensor):
        raise NoSiteMatched(f'"{name}" is a {type(tensor).__name__}; a target dict maps names to tensors')
    for kind, _ in _kinds(selector, name, TENSOR_KINDS, "grad"):
        if not tensor.requires_grad:
            raise NoSuchKind(
                f'"{name}" does not require grad, so it has no gradient to hook; call requires_grad_() on it first'
            )
        if kind == "acc" and not tensor.is_leaf:
            raise NoSuchKind(
                f'"{name}:acc" is .grad after accumulation, but {name} is not a leaf: it was made by '
                f"{tensor.grad_fn.name() if tensor.grad_fn else 'an operation'} and accumulates nothing; use "
                f'"{name}:grad"'
            )
        gate = TensorGate(owner, name, kind)
        owner.installed.install(InstalledHook(_hook(gate, tensor)))
        gate.attach(spec, Site(name, kind))


def place_node(owner: Owner, target: Node | GradientEdge, selector: Selector | None, spec: Spec) -> None:
    """Attach taps to the gradients that arrive at an autograd node or leave it."""
    node, number = (target.node, str(target.output_nr)) if isinstance(target, GradientEdge) else (target, None)
    name = re.sub(r"^torch::autograd::", "", node.name())
    for kind, leaf in _kinds(selector, name, NODE_KINDS, "pre"):
        gate = TensorGate(owner, name, kind)
        owner.installed.install(InstalledHook(_hook_node(gate, node)))
        gate.attach(spec, Site(name, kind, leaf or (number if kind == "pre" else None)))


def means(term: Term, name: str) -> bool:
    """Whether a term of a selector matches a target of this name that is not a model."""
    return not term.path or term.matches(name, ())


def _kinds(
    selector: Selector | None, name: str, allowed: tuple[str, ...], default: str
) -> list[tuple[str, str | None]]:
    """Return the kinds and leaves that a selector names for a target that is not a model."""
    if selector is None:
        return [(default, None)]
    wanted = [t for t in selector.terms if means(t, name)]
    for term in wanted:
        if (term.kind or default) not in allowed:
            raise NoSuchKind(f'"{term}": {name} has no :{term.kind}; it has {", ".join(":" + k for k in allowed)}')
    return [(t.kind or default, t.leaf) for t in wanted]


unserializable_hook(TensorGate.fire)
untraced(TensorGate.fire, _hook_accumulated, _hook_node)
