"""Watching a whole program: every root module that it calls, and every optimizer's steps.

# Note [Roots]
A root is a module that is called while no other watched one runs. It is found at its first call
by a global forward-pre hook and gets its hooks before its forward runs, so that a model handed to
`torch.compile` is hooked before it is compiled. The first root's sites have their plain names;
those of others begin with their class name.

# Note [Two levels]
On schedule a step is measured in full. In every other step only the sums of outputs and the norms
of parameters' gradients are taken, which shows whether all is finite; they are written only if
something is not. Outputs of modules such as ReLU, finite if their inputs are, are left out. So a
NaN is seen in the step in which it is born, whatever the schedule.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from kedge.errors import ActionDisabled
from kedge.hooks import compiled, dynamo
from kedge.hooks.attach import Target, has_optimizer
from kedge.hooks.causes import explain
from kedge.hooks.roots import (
    KEEPS_FINITE,
    Gauge,
    Log,
    Prefixed,
    Root,
    Summary,
    channel_dims,
    entry_of,
    is_replica,
    sample,
    unwrapped,
)
from kedge.hooks.schedule import Passes, every
from kedge.hooks.session import Session
from kedge.hooks.tap import Tap
from kedge.sites.select import Selector, runs
from kedge.sites.site import Site, escape
from kedge.store.rows import FINITENESS, FULL

_OFF = 0
_PATIENCE = 30
"""How often another optimizer may step before it is taken to be in charge; critics step some 5 times a generator's."""


class _WatchSession(Session):
    """A session inside somebody's program: it complains on stderr, where ``-W error`` does not reach."""

    def complain(self, warning: ActionDisabled) -> None:
        """Say it without raising."""
        sys.stderr.write(f"[kedge] {warning}\n")

    def refresh(self) -> None:
        """Nothing: a root gets its hooks before its first forward, so before it is compiled."""


class Watch:
    """Watches what a program does, while a ``with`` block lasts.

    Args:
        meter: What measures; it is told to pass its steps to this watch.
        log: Where records go.
        sites: A selector; outputs, gradients and parameters at the paths it names are measured.
        n: One step in `n` is measured in full.

    Attributes:
        holding: Set to a list to have it keep the roots alive to the end.
    """

    def __init__(self, meter: Gauge, log: Log, *, sites: str = "**", n: int = 10) -> None:
        self.log, self.selector, self.schedule = log, Selector(sites), every(n)
        self.meter = meter
        meter.sink = self
        self.session = _WatchSession(on_error="warn")
        self.roots: list[Root] = []
        self.params: dict[int, tuple[weakref.ref[nn.Parameter], Site]] = {}
        self.pid = os.getpid()
        self.sampled: set[int] = set()
        self.spent = 0.0
        self.failed = False
        self.holding: list[nn.Module] | None = None
        self._known: dict[int, weakref.ref[nn.Module]] = {}
        self._written = (0, 0)
        self._undo = ExitStack()
        self._samples: dict[int, dict[int, Tensor]] = {}
        self._unfinished: list[Root] = []
        self._leading: weakref.ref[Optimizer] | None = None
        self._attaching = threading.RLock()
        self._idle = 0
        self._began = time.perf_counter()
        self.session.clock.on_step.append(self._spare(self._step_ended))
        self.session.clock.on_pass.append(self._spare(self._pass_began))

    def __enter__(self) -> Self:
        """Begin to watch."""
        self._undo.callback(register_module_forward_pre_hook(self._spare(self._entered)).remove)
        self._undo.callback(register_optimizer_step_pre_hook(self._spare(self._before_update)).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._spare(self._after_update)).remove)
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _abandon(mine()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Write what is left, and remove every hook."""
        if os.getpid() != self.pid:
            return
        try:
            if not self.failed:
                self._write_last()
        finally:
            self._undo.close()
            self.session.end(quiet=True)

    def _write_last(self) -> None:
        with self._timed():
            self.meter.finish()
        silent = [t for t in self.session.taps if t.site.kind in ("out", "param.grad") and not t.fired]
        self.log.event({"kind": "ledger", "sites": [self._silence(tap) for tap in silent]})

    def _silence(self, tap: Tap) -> dict[str, Any]:
        """Say why a site never fired, under the path it is recorded with."""
        param = getattr(tap.gate, "param", None)
        known = self.params.get(id(param)) if param is not None else None
        root = next((r for r in self.roots if r.passes is getattr(tap.gate, "passes", None)), None)
        path = known[1].path if known is not None else root.label(tap.site.path) if root is not None else tap.site.path
        cause = explain(tap)
        return {"site": str(replace(tap.site, path=path)), "fired": 0, "cause": cause.why, "remedy": cause.remedy}

    @property
    def summary(self) -> Summary:
        """What came out so far."""
        clock = self.session.clock
        steps = clock.step if clock.optimizer is not None else clock.led
        return Summary(len(self.meter.seats), steps, len(self.sampled), time.perf_counter() - self._began, self.cost())

    def cost(self) -> float:
        """Seconds that watching took: measuring and writing are timed, the passing of hooks is calibrated."""
        return self.spent + self.meter.seconds + self.meter.events * _HOOK_SECONDS

    # -- roots -----------------------------------------------------------------------------------

    def _spare(self, work: Callable[..., None]) -> Callable[..., None]:
        """Make a hook that never ends the program: if Kedge fails, it says so once and steps aside."""

        def hook(*args: Any) -> None:
            if torch.compiler.is_compiling() or self.failed or os.getpid() != self.pid or torch._C._is_tracing():
                return
            try:
                work(*args)
            except Exception as error:  # noqa: BLE001 - it is the user's program that runs around this
                self.failed, self.meter.level = True, _OFF
                sys.stderr.write(f"[kedge] watching failed and is off from here on: {type(error).__name__}: {error}\n")

        return hook

    def _entered(self, module: nn.Module, args: Any) -> None:
        """See every module call of the program; the first call of a root makes it watched."""
        known = self._known.get(id(module))
        if (known is not None and known() is module) or is_replica(module) or compiled.in_backward():
            return
        self._know([module])
        if isinstance(module, torch.jit.ScriptModule):
            return  # PyTorch runs no hooks on it
        captured = isinstance(module, torch.fx.GraphModule) and dynamo.has_compiled()  # a graph, not the user's module
        if not captured and not any(root.passes.here.inside for root in self.roots):
            with self._attaching, self._timed():
                self._watch(unwrapped(module))
            self._begin_first(module, args)

    def _begin_first(self, module: nn.Module, args: Any) -> None:
        """Begin the call under way, of whose hooks PyTorch had made the list before these were there."""
        target = self.session.targets.get(id(module))
        if target is not None:
            target.begin(module, args)
            if id(module) in target.before:
                target.before[id(module)](module, args, {})

    def _know(self, modules: Iterable[nn.Module]) -> None:
        self._known.update((id(m), weakref.ref(m)) for m in modules)

    def _watch(self, module: nn.Module) -> None:
        named = dict(module.named_modules())
        fresh = {
            name: m
            for name, m in named.items()
            if (m is module or not self._is_known(m)) and not isinstance(m, torch.jit.ScriptModule)
        }
        self._know(named.values())
        target = self.session.targets[id(module)] = Target(self.session, module)
        parameters = sum(p.numel() for p in module.parameters() if not is_lazy(p))
        name = type(module).__name__
        types = {n: type(m).__name__ for n, m in fresh.items()}
        root = Root(weakref.ref(module), len(self.roots), name, self._prefix(name), parameters, types, target.passes)
        if parameters and not any(r.parameters for r in self.roots):
            self.session.clock.lead(target.passes, lambda: has_optimizer(root.module()))
            self.session.clock.look()
        self.roots.append(root)
        self._hook(module, root, fresh)
        if any(is_lazy(p) for p in module.parameters()):
            self._unfinished.append(root)
        target.held = None  # the program's models live as long as the program wants
        if self.holding is not None:
            self.holding.append(module)

    def _is_known(self, module: nn.Module) -> bool:
        known = self._known.get(id(module))
        return known is not None and known() is module

    def _prefix(self, name: str) -> str:
        if not self.roots:
            return ""
        taken = {root.prefix for root in self.roots}
        return next(p for p in (name, *(f"{name}_{i}" for i in range(2, 10_000))) if p not in taken)

    def _hook(self, module: nn.Module, root: Root, fresh: Mapping[str, nn.Module]) -> None:
        action = Prefixed(self.meter, root)
        paths = [n for n, m in fresh.items() if runs(m) and self._selected(root, n, m)]
        self.meter.channel_dims.update(channel_dims(module, fresh, root))
        for selector, when in (("out", None), ("in", None), ("out.grad", self.schedule)):
            _hook_each(self.session, module, paths, selector, action, when)
        self._hook_parameters(module, root)

    def _hook_parameters(self, module: nn.Module, root: Root) -> None:
        fresh = [
            (name, param)
            for name, param in module.named_parameters()
            if not is_lazy(param) and self._site_of(param) is None and self._selected(root, name, module)
        ]
        for name, param in fresh:
            self.params[id(param)] = (weakref.ref(param), Site(root.label(name), "param"))
        chosen = [name for name, param in fresh if param.requires_grad]
        _hook_each(self.session, module, chosen, "param.grad", Prefixed(self.meter, root), self.schedule)
        for station in self.session.targets[id(module)].stations.values():
            station.param = None  # as with the module itself: they live as long as the program wants

    def _finish_lazy(self) -> None:
        """Hook the parameters that a first forward has given their shapes."""
        waiting, self._unfinished = self._unfinished, []
        for root in waiting:
            module = root.module()
            if module is not None:
                root.types.update((n, type(m).__name__) for n, m in module.named_modules() if n in root.types)
                self._hook_parameters(module, root)

    def _site_of(self, param: nn.Parameter) -> Site | None:
        known = self.params.get(id(param))
        return known[1] if known is not None and known[0]() is param else None

    def _selected(self, root: Root, path: str, module: nn.Module) -> bool:
        types = tuple(c.__name__ for c in type(module).__mro__)
        label = root.label(path)
        wanted = any(t.matches(label, types) for t in self.selector.terms if not t.excluded)
        return wanted and not any(t.matches(label, types) for t in self.selector.terms if t.excluded)

    # -- steps -----------------------------------------------------------------------------------

    def _pass_began(self, passes: Passes) -> None:
        """Decide whether this pass is measured: validation between training steps is not."""
        clock = self.session.clock
        trains = clock.optimizer is not None or clock.awaited > 0
        self.meter.muted = trains and not passes.here.graded
        if self.meter.level == FULL and not self.meter.muted:
            self.sampled.add(clock.step)

    def _step_ended(self, step: int) -> None:
        with self._timed():
            self.meter.flush()
            if self._unfinished:
                self._finish_lazy()
            if step in self.sampled:
                self._relax()
        self.meter.level = FULL if self.schedule(self.session.clock.step) else FINITENESS

    def _relax(self) -> None:
        """Leave out of the steps in between what cannot tell anything new; see Note [Two levels].

        That is the input that was some watched output, and the output of what makes finite values
        of finite ones.
        """
        for tap in self.session.taps:
            if tap.when is None and tap.fired and self._says_nothing_new(tap):
                tap.when = self.schedule

    def _says_nothing_new(self, tap: Tap) -> bool:
        root = next(r for r in self.roots if r.passes is tap.gate.passes)
        site = replace(tap.site, path=root.label(tap.site.path))
        if site.kind == "in":
            seat = self.meter.seats.get(site)
            return seat is not None and bool(seat.sources) and None not in seat.sources
        return root.types.get(tap.site.path) in KEEPS_FINITE

    def _follow(self, optimizer: Optimizer) -> None:
        """Let another optimizer make the steps when the one that made them is gone, or has long been idle."""
        clock = self.session.clock
        leading = self._leading() if self._leading is not None else None
        if clock.optimizer is None or leading is optimizer:
            self._idle = 0
        elif self._leading is None:
            self._leading = weakref.ref(optimizer) if clock.optimizer[0] == id(optimizer) else None
        else:
            self._idle += 1
            if leading is None or self._idle > _PATIENCE:
                clock.optimizer, self._leading = None, None

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._follow(optimizer)
        if self.meter.level == _OFF:
            return
        with self._timed():
            held = self._held(optimizer)
            step = self.session.clock.step
            if self.meter.level == FULL:
                self._samples[id(optimizer)] = {id(p): sample(p).clone() for p, _ in held}
                self._norms(step, [(p, site) for p, site in held])
                return
            graded = [
                (p.grad, _of(site, "param.grad")) for p, site in held if p.grad is not None and not p.grad.is_sparse
            ]
            self._norms(step, graded)
            if self.meter.spoiled():
                self._norms(step, [(p, site) for p, site in held])

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        before = self._samples.pop(id(optimizer), None)
        if not before:
            return
        with self._timed():
            held = [(p, site) for p, site in self._held(optimizer) if id(p) in before]
            changes = [(sample(p) - before[id(p)], _of(site, "update")) for p, site in held]
            self._norms(self.session.clock.step, changes)

    def _held(self, optimizer: Optimizer) -> list[tuple[nn.Parameter, Site]]:
        held: list[tuple[nn.Parameter, Site]] = []
        for group in optimizer.param_groups:
            held += [(p, site) for p in group["params"] if (site := self._site_of(p)) is not None]
        return held

    def _norms(self, step: int, tensors: list[tuple[Tensor, Site]]) -> None:
        self.meter.add([site for _, site in tensors], step, [tensor.detach() for tensor, _ in tensors])

    # -- writing ---------------------------------------------------------------------------------

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:
        """Write one step, and before it the sites that are new; see `kedge.flow.Sink`."""
        seats = self.meter.seats.values()
        size = (len(seats), sum(len(seat.sources) for seat in seats))
        if size != self._written:
            self._written = size
            self.log.sites([entry_of(seat, self.roots) for seat in seats], [root.entry() for root in self.roots])
        self.log.stats(step, columns)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the time of a block to what watching costs, without what the meter times itself."""
        start, inner = time.perf_counter(), self.meter.seconds
        try:
            yield
        finally:
            self.spent += time.perf_counter() - start - (self.meter.seconds - inner)


_HOOK_SECONDS = 2.5e-6
"""What it takes to bring one event to the meter, on the machine that `benchmarks/overhead.py` ran on."""


def _hook_each(session: Session, module: nn.Module, paths: list[str], kind: str, action: Any, when: Any) -> None:
    if paths:
        session.hook(module, ", ".join(f"{escape(p)}:{kind}" for p in paths), action, when=when)


def _of(site: Site, kind: str) -> Site:
    return replace(site, kind=kind)


def _abandon(watch: Watch | None) -> None:
    """In a forked child: the recording belongs to the parent."""
    if watch is not None:
        watch.meter.level = _OFF
