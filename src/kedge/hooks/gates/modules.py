"""Modules: one forward-pre and one forward hook for each hooked module of a session.

# Note [Two gates]
All taps of a session on one module stand at two gates: `Before` sees the inputs, `After` the
outputs. Gradients are listened to from there, on the tensors that pass, because a module's own
backward hooks change bits (Note [No full backward hooks]).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kedge.flow import Event, Preserving
from kedge.hooks.firing.find_tensors import look_through
from kedge.hooks.firing.fire import fire
from kedge.hooks.firing.measuring import measure_value
from kedge.hooks.firing.tap import Tap
from kedge.hooks.gates import compiled
from kedge.hooks.gates.gradients import Listener, Share, ValueListener, edge_of, edges_into, listen, listen_share
from kedge.hooks.placing.concealed import Own, Veil
from kedge.hooks.placing.installed import Mount
from kedge.sites import leaves
from kedge.sites.site import Site
from kedge.torch_internals.aliases import MemoryVersion
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.module_tables import own_parameters
from kedge.torch_internals.source_lines import is_running

if TYPE_CHECKING:
    from kedge.hooks.firing.schedule import Passes
    from kedge.hooks.session import Session


class Gate(Own):
    """The taps of one session on one side of one module."""

    kinds: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    """The kinds of which a value alone may be enough; see Note [Values alone]."""

    def __init__(self, session: Session, passes: Passes, path: str) -> None:
        self.session, self.passes, self.path = session, passes, path
        self.taps: dict[str, tuple[Tap, ...]] = dict.fromkeys(self.kinds, ())
        self.sites: dict[tuple[str, str], Site] = {}
        self.live, self.measures = False, True
        self.called = self.recalled = self.listened = 0
        self.leaves: dict[str, None] = {}
        self.empty: str | None = None
        self.share_cause: str | None = None
        self.pulses: dict[str, MemoryVersion] = {}

    @property
    def whose(self) -> int:
        """Tells the sites of one model from those of another of the same names."""
        return id(self.passes)

    def is_last(self, table: Mapping[int, Any]) -> bool:
        """Whether nobody has hooked the module since; behind others a new gate is needed to keep the order."""
        return next(reversed(list(table.values())), None) is self

    def add(self, tap: Tap) -> None:
        """Take a tap in, behind those of its kind that stand here already."""
        tap.gate = self
        self.taps[tap.site.kind] += (tap,)
        self.retime()

    def drop(self, tap: Tap) -> None:
        """Let a tap go; a firing under way still sees the old tuple."""
        self.taps[tap.site.kind] = tuple(t for t in self.taps[tap.site.kind] if t is not tap)
        self.retime()

    def retime(self) -> None:
        """Find out whether anything here is on schedule, and whether all that is done is to measure."""
        taps = [tap for taps in self.taps.values() for tap in taps]
        self.live = any(map(self.wakes, taps))
        self.measures = all(tap.measure is not None and tap.site.kind in self.measured for tap in taps)

    def wakes(self, tap: Tap) -> bool:
        """Whether a tap is on schedule, or is to edit again what a checkpoint will recompute of a step that was."""
        return tap.on or (tap.when is not None and tap.edited and self.passes.segments.some)

    def site(self, kind: str, leaf: str) -> Site:
        """The site of one leaf, made once."""
        site = self.sites.get((kind, leaf))
        if site is None:
            site = self.sites[kind, leaf] = Site(self.path, kind, leaf or None)
            self.leaves[leaf] = None
        return site

    def through(self, kind: str, found: list[tuple[str, Tensor]], call: int, recompute: bool) -> dict[str, Tensor]:
        """Run every leaf through the taps of a kind; return those that changed."""
        new = {}
        for leaf, tensor in found:
            event = self.passes.event(self.site(kind, leaf), call, recompute)
            result = fire(self.taps[kind], tensor, event)
            if result is not tensor:
                new[leaf] = result
        return new

    def listen(self, kind: str, found: list[tuple[str, Tensor]], call: int, recompute: bool) -> None:
        """Set hooks for the gradients of the leaves that have one."""
        if recompute and not self.passes.differentiates_again(self.listened):
            return
        heard: dict[int, Listener] = {}
        for leaf, tensor in found:
            site = self.site(kind, leaf)
            if not tensor.requires_grad or self.passes.is_heard((self, site, call), recompute=recompute):
                continue
            self.listened += not recompute
            event, known = self.passes.event(site, call, recompute), heard.get(id(tensor))
            if known is not None:
                known.also = {**known.also, site: event}
                continue
            listener = heard[id(tensor)] = listen(tensor, Listener(self, event), recompute=recompute)
            if listener.pulse is not None:
                self.pulses[kind] = listener.pulse

    def measure(self, kind: str, found: list[tuple[str, Tensor]], call: int) -> None:
        """Hand every leaf to what measures it; see Note [Values alone]."""
        taps, step, make = self.taps[kind], self.session.clock.step, self._event
        for leaf, tensor in found:
            self.leaves[leaf] = None
            measure_value(taps, tensor, step, make, (kind, leaf, call))

    def _event(self, kind: str, leaf: str, call: int) -> Event:
        return self.passes.event(self.site(kind, leaf), call, recompute=False)

    def hear(self, kind: str, found: list[tuple[str, Tensor]], call: int) -> None:
        """Set hooks that measure the gradients of the leaves that have one; see Note [Values alone]."""
        here = self.passes.here
        alone = len(found) == 1 or len({id(tensor) for _, tensor in found}) == len(found)
        if here.segment is not None or not alone:
            self.listen(kind, found, call, recompute=False)
            return
        for leaf, tensor in found:
            if tensor.requires_grad:
                self.listened += 1
                listener = listen(tensor, ValueListener(self, self.site(kind, leaf), call, here))
                if listener.pulse is not None:
                    self.pulses[kind] = listener.pulse


class After(Gate):
    """Sees what a module returns: ``out``, ``out.grad`` and ``in.share``."""

    kinds = ("out", "out.grad", "in.share")
    measured = ("out", "out.grad")
    backward = False

    def retime(self) -> None:
        """Find out whether anything here is on schedule, and whether gradients are."""
        super().retime()
        self.backward = any(tap.on for kind in ("out.grad", "in.share") for tap in self.taps[kind])

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Be the forward hook."""
        __tracebackhide__ = True
        if not self.live:
            return None
        if torch.compiler.is_compiling():
            return compiled.after(self, output)
        call, recompute = self.passes.count(self)
        self.called += 1
        self.recalled += recompute
        if self.measures and not recompute:
            self._measure(output, call)
            return None
        if isinstance(output, Tensor) and not self.backward:  # the common case, and the one that has to be fast
            new = fire(self.taps["out"], output, self.passes.event(self.site("out", ""), call, recompute))
            return None if new is output else new
        return self._structured(output, call, recompute)

    def _measure(self, output: Any, call: int) -> None:
        __tracebackhide__ = True
        found = [("", output)] if isinstance(output, Tensor) else look_through(self, leaves.find, output)
        if not found:
            self.empty = self.empty or leaves.describe(output)
            return
        if self.taps["out"]:
            self.measure("out", found, call)
        if self.backward:
            self.hear("out.grad", found, call)

    def _structured(self, output: Any, call: int, recompute: bool) -> Any:
        __tracebackhide__ = True
        found = look_through(self, leaves.find, output)
        if not found:
            self.empty = self.empty or leaves.describe(output)
            return None
        new: dict[str, Tensor] = {}
        if self.taps["out"]:
            new = self.through("out", found, call, recompute)
            found = [(leaf, new.get(leaf, tensor)) for leaf, tensor in found] if new else found
        if self.backward and self.taps["out.grad"]:
            self.listen("out.grad", found, call, recompute)
        if self.backward and self.taps["in.share"]:
            self._share([tensor for _, tensor in found], call, recompute)
        return leaves.put(output, new) if new else None

    def _share(self, outputs: list[Tensor], call: int, recompute: bool) -> None:
        """Listen to what this call sends back to each of its inputs; see Note [The share of one call]."""
        edges = self.passes.here.shares.pop(self, {})
        if not edges:
            self.share_cause = "there is no tensor to see: its arguments hold no tensor"
        for leaf, found in edges_into(outputs, edges).items():
            if not found:
                self.share_cause = (
                    "no operation of the call lies between this input and the outputs, or it needs no gradient"
                )
                continue
            origin = self.passes.event(self.site("in.share", leaf), call, recompute)
            listen_share(Share(self, origin, len(found)), found)


class Before(Gate):
    """Sees what a module is given: ``in``, ``in.grad`` and its parameters; prepares ``in.share``."""

    kinds = ("in", "in.grad", "param")
    measured = ("in", "in.grad")

    def __init__(self, session: Session, passes: Passes, path: str, module: nn.Module) -> None:
        super().__init__(session, passes, path)
        self.names = _positional_names(module)
        self.params: dict[str, tuple[str, nn.Parameter]] = {}
        self.sharing: list[After] = []
        self.preserving: list[Preserving] = []

    def retime(self) -> None:
        """Stay awake for shares and for values that the module would overwrite."""
        super().retime()
        self.live = self.live or bool(self.sharing or self.preserving)
        self.measures = self.measures and not (self.sharing or self.preserving)

    def share_with(self, gate: After) -> None:
        """Note the inputs' edges of each call for a gate behind the module, which needs them for shares."""
        if gate not in self.sharing:
            self.sharing.append(gate)
        self.retime()

    def watch_overwrites(self, actions: Iterable[Preserving]) -> None:
        """Stand before a module that works in place, for actions that keep its input without a copy."""
        self.preserving += [action for action in actions if action not in self.preserving]
        self.retime()

    def canonical(self, leaf: str | None) -> str | None:
        """Return the name under which a leaf fires: a position becomes its argument's name."""
        if leaf is None:
            return None
        head, dot, rest = leaf.partition(".")
        known = head.isdigit() and int(head) < len(self.names)
        return (self.names[int(head)] if known else head) + dot + rest

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        """Return every tensor among the arguments, by the argument's name."""
        found = []
        for i, value in enumerate(args):
            found += leaves.find(value, self.names[i] if i < len(self.names) else str(i))
        for name, value in kwargs.items():
            found += leaves.find(value, name)
        return found

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Be the forward-pre hook; keyword arguments are lacking if it is taken down in another thread meanwhile."""
        __tracebackhide__ = True
        if not self.live:
            return None
        kwargs = {} if kwargs is None else kwargs
        if torch.compiler.is_compiling():
            return compiled.before(self, module, args, kwargs)
        call, recompute = self.passes.count(self)
        self.called += 1
        self.recalled += recompute
        if self.measures and not recompute:
            self._measure(args, kwargs, call)
            return None
        return self._structured(module, args, kwargs, call, recompute)

    def _structured(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: int, recompute: bool
    ) -> Any:
        __tracebackhide__ = True
        if self.taps["param"]:
            self._parameters(module, call, recompute)
        found = look_through(self, self.find, args, kwargs)
        if not found:
            self.empty = self.empty or "its arguments hold no tensor"
            return None
        new: dict[str, Tensor] = {}
        if self.taps["in"]:
            new = self.through("in", found, call, recompute)
            found = [(leaf, new.get(leaf, tensor)) for leaf, tensor in found] if new else found
        if self.taps["in.grad"]:
            self.listen("in.grad", found, call, recompute)
        for gate in self.sharing:
            self.passes.here.shares[gate] = {leaf: edge_of(tensor) for leaf, tensor in found}
        if self.preserving and getattr(module, "inplace", False):
            overwritten = [leaves.storage_of(tensor) for _, tensor in found]
            for action in self.preserving:
                action.preserve(overwritten)
        return self.replaced(args, kwargs, new) if new else None

    def _measure(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: int) -> None:
        __tracebackhide__ = True
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            found = [(self.names[0] if self.names else "0", args[0])]
        else:
            found = look_through(self, self.find, args, kwargs)
        if not found:
            self.empty = self.empty or "its arguments hold no tensor"
            return
        if self.taps["in"]:
            self.measure("in", found, call)
        if self.taps["in.grad"]:
            self.hear("in.grad", found, call)

    def _parameters(self, module: nn.Module, call: int, recompute: bool) -> None:
        for tap in self.taps["param"]:
            if tap.on and self.is_first(tap.site):
                fire((tap,), self.held(module, tap.site), self.passes.event(tap.site, call, recompute))

    def is_first(self, site: Site) -> bool:
        """Whether a parameter, which several modules may hold, is seen here: where the first of them is called."""
        return self.passes.here.holders.setdefault(site.path, self) is self

    def held(self, module: nn.Module, site: Site) -> Tensor:
        """Return the value of a parameter now: a call may be given another, as by `torch.func.functional_call`."""
        name, param = self.params[site.path]
        now = own_parameters(module).get(name)
        if now is None or now is param or leaves.own_part(param) is not param:  # FSDP gathers what is spread
            return param.detach()
        return now.detach().clone()  # it may live no longer than the call

    def replaced(self, args: tuple[Any, ...], kwargs: dict[str, Any], new: Mapping[str, Tensor]) -> Any:
        """Return the arguments with some of their tensors replaced."""
        changed = list(args)
        for i, value in enumerate(args):
            changed[i] = leaves.put(value, new, self.names[i] if i < len(self.names) else str(i))
        return tuple(changed), {name: leaves.put(value, new, name) for name, value in kwargs.items()}


def _positional_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments that a module's forward takes by position."""
    try:
        params = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a compiled or scripted forward does not tell
        return ()
    return tuple(p.name for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


class Begin(Own):
    """The hook by which a model's forward pass is seen to begin; a model that calls itself is still in the same."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.key = compiled.register(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Be a forward-pre hook."""
        if torch.compiler.is_compiling():
            compiled.begin(self.key)
        elif not in_backward():
            here, frame = self.passes.here, sys._getframe(1)
            if here.inside and is_running(here.frame, frame):  # an interrupt may have skipped the end
                here.past = {}
            else:
                here.frame = frame
                self.passes.begin()


class End(Own):
    """The hook by which a model's forward pass is seen to end."""

    def __init__(self, begin: Begin) -> None:
        self.begin = begin

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Be a forward hook."""
        if torch.compiler.is_compiling():
            compiled.end(self.begin.key)
        elif not in_backward():
            here, frame = self.begin.passes.here, sys._getframe(1)
            if here.frame is frame or not is_running(here.frame, frame):
                here.frame = None
                self.begin.passes.end()


def attach(session: Session, module: nn.Module, hook: Any) -> None:
    """Register a module hook that goes with the session, and conceal it."""
    if isinstance(hook, Before) or getattr(hook, "early", False):
        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    elif isinstance(hook, Begin):
        handle = module.register_forward_pre_hook(hook)
    else:
        handle = module.register_forward_hook(hook, always_call=True)  # so that a call that raises is counted
    session.mount(Mount(handle))
    session.mount(Veil(module))


untraced(Before.__call__, After.__call__, Begin.__call__, End.__call__)
