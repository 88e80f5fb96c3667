"""Watching a whole program: every root module that it calls, and every optimizer's steps.

# Note [Roots]
A root is a module that is called while no other watched one runs. It is found at its first call
by a global forward-pre hook and gets its hooks before its forward runs, so that a model handed to
`torch.compile` is hooked before it is compiled. The first root's sites have their plain names;
those of others begin with their class name.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from kedge.hooks.asleep import Asleep
from kedge.hooks.known import Known, Places
from kedge.hooks.leader import Leader
from kedge.hooks.levels import OFF, Levels, Quiet
from kedge.hooks.pace import Level, Pace, unit
from kedge.hooks.roots import (
    Gauge,
    Log,
    Prefixed,
    Root,
    Summary,
    channel_dims,
    entry_of,
    free_prefix,
    leads_anew,
    next_of,
    saturations,
    selected,
    silences,
    unwrapped,
)
from kedge.hooks.schedule import Passes
from kedge.hooks.survey import Survey
from kedge.hooks.updates import Updates
from kedge.sites.leaves import own_part
from kedge.sites.select import Selector, runs
from kedge.torch_internals import dynamo, modes
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.source_lines import module_tree

if TYPE_CHECKING:
    from kedge.hooks.dump import Dump

_PER_EVENT, _PER_STEP = 3.0, 12.0
"""What it takes to bring one event to the meter, and to count a step with cold memories, in calls of an empty module hook."""


class Watch:
    """Watches what a program does, while a ``with`` block lasts.

    Args:
        meter: What measures; it is told to pass its steps to this watch.
        log: Where records go.
        sites: A selector; outputs, gradients and parameters at the paths it names are measured.
        n: One step in `n` is measured in full, or fewer if the budget does not allow it.
        budget: The share of the program's time that watching may take; None for no limit.

    Attributes:
        dump: Set to what keeps the call that made the first value that is not finite.
        holding: Set to a list to have it keep the roots alive to the end.
        failure: What Kedge failed with, and watches no more since; None where all goes well.
        step: Gives the step under way.
        names: What to call modules that may turn out to be roots, by the model that holds them and is not called itself.
    """

    def __init__(self, meter: Gauge, log: Log, *, sites: str = "**", n: int = 10, budget: float | None = None) -> None:
        self.log, self.selector, self.pace = log, Selector(sites), Pace(n, budget)
        self.meter, meter.sink, meter.draws = meter, self, True
        self.session = Quiet()
        self.roots: list[Root] = []
        self._places = Places(self.roots)
        self.pid = os.getpid()
        self.sampled: set[int] = set()
        self.spent = 0.0
        self.failure: Exception | None = None
        self.holding: list[nn.Module] | None = None
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._known = Known()
        self._written, self._undo = (0, 0), ExitStack()
        self.levels = Levels(self.session, meter, self._trains)
        self.lookout = self.levels.lookout
        self.updates = Updates(meter, lambda: self.session.clock.step, self._places.of)
        self._leader = Leader(self.session.clock)
        self._notes: list[Mapping[str, Any]] = []
        clock, note = self.session.clock, self._notes.append
        self._asleep = Asleep(self.pace, clock, self.updates, self.levels, self.cost, self._timed, note)
        self.survey, self.step = Survey(), self._asleep.step
        self.dump: Dump | None = None
        self._end_step, self._measure_update = self._spare(self._step_ended), self._spare(self._after_update)
        self._waken, self._meet = self._spare(self._asleep.awaken), self._spare(self._place_again)
        self._rise, self._tell = self._spare(self._asleep.rise), self._spare(self._asleep.tell)
        self._unfinished: list[Root] = []
        self._attaching = threading.RLock()
        self._unit, self._began = 0.0, time.perf_counter()
        clock.counters, clock.on_step[:] = [], [self._stepped]  # when a site fires is decided by the level of the step
        clock.on_pass.append(self._spare(self._pass_began))

    def __enter__(self) -> Self:
        """Begin to watch."""
        self._unit = unit()
        scout = register_module_forward_pre_hook(self._spare(self._entered))
        ahead = register_optimizer_step_pre_hook(self._spare(self._before_update))
        self.levels.take(scout, ahead)
        self._undo.callback(scout.remove)
        self._undo.callback(ahead.remove)
        self._undo.callback(register_optimizer_step_post_hook(self._updated).remove)
        self._undo.callback(self.levels.close)
        self.pace.begin(time.perf_counter(), self.cost())
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
            self.survey.close(0)
            if self.dump is not None:
                self.dump.close()
            self._undo.close()
            self.session.end(quiet=True)

    def _write_last(self) -> None:
        with self._timed():
            self._notes += self.survey.close(self.session.clock.step)
            self.meter.finish()
        silent = silences(self.roots, self.session.taps)
        self.log.event({"kind": "ledger", "sampled": len(self.sampled), "sites": silent})

    @property
    def failed(self) -> bool:
        """Whether Kedge has failed."""
        return self.failure is not None

    @property
    def summary(self) -> Summary:
        """What came out so far."""
        clock = self.session.clock
        steps = clock.step + self._asleep.passed if clock.optimizer is not None else clock.led
        seconds, counts = time.perf_counter() - self._began, self.pace.counts
        full, light = counts[Level.FULL], counts[Level.NORM] + counts[Level.LOOK] + counts[Level.GLANCE]
        levels = {"full": full, "light": light, "off": max(steps - full - light, 0)}
        return Summary(len(self.meter.seats), steps, len(self.sampled), seconds, self.pace.total(self.cost()), levels)

    def cost(self) -> float:
        """Seconds that watching took: measuring and writing are timed, what PyTorch takes to call hooks is calibrated."""
        called = _PER_EVENT * self.meter.events + self.lookout.looks + _PER_STEP * self.session.clock.step
        return self.spent + self.meter.seconds + self.lookout.seconds + self.survey.seconds + called * self._unit

    # -- roots -----------------------------------------------------------------------------------

    def _spare(self, work: Callable[..., None]) -> Callable[..., None]:
        """Make a hook that never ends the program: if Kedge fails, it says so once and steps aside."""

        def hook(*args: Any) -> None:
            if torch.compiler.is_compiling() or self.failed or os.getpid() != self.pid or modes.is_under_jit():
                return
            try:
                work(*args)
            except Exception as error:  # noqa: BLE001 - it is the user's program that runs around this
                error.add_note(traceback.format_exc())  # the traceback itself would keep what it went through
                self.failure, self.meter.level = error.with_traceback(None), OFF
                sys.stderr.write(f"[kedge] watching failed and is off from here on: {type(error).__name__}: {error}\n")

        return hook

    def _entered(self, module: nn.Module, args: Any) -> None:
        """See every module call of the program; the first call of a root makes it watched."""
        if not self.levels.scouts or module in self._known or self._known.is_aside(module) or in_backward():
            return
        self._known.meet([module])
        if isinstance(module, torch.jit.ScriptModule):
            return  # PyTorch runs no hooks on it
        inner = unwrapped(module)
        if inner is not module and inner in self._known:
            return  # it was called before it was wrapped
        captured = isinstance(module, torch.fx.GraphModule) and dynamo.has_compiled()  # a graph, not the user's module
        if not captured and not self.lookout.now.root and not any(r.is_running for r in self.roots):
            with self._attaching, self._timed():
                root = self._watch(inner)
                if self.dump is not None:
                    self.dump.watch(inner, root.label, begun=inner is module)
                if inner is module and not root.follows:
                    self.survey.add(module, root)
            self._begin_first(module, args)

    def _begin_first(self, module: nn.Module, args: Any) -> None:
        """Begin the call under way, of whose hooks PyTorch had made the list before these were there."""
        target = self.session.targets.get(id(module))
        if target is not None:
            target.begin(module, args)
            if id(module) in target.before:
                target.before[id(module)](module, args, {})

    def _watch(self, module: nn.Module) -> Root:
        named = dict(module.named_modules())
        fresh = {
            name: m
            for name, m in named.items()
            if (m is module or m not in self._known) and not isinstance(m, torch.jit.ScriptModule)
        }
        self._known.meet(named.values())
        types = {n: type(m).__name__ for n, m in fresh.items()}
        prefix = self.names[module] if module in self.names else free_prefix(type(module).__name__, self.roots)
        self._release_gone()
        root = next_of(self.roots, types) or Root(len(self.roots), prefix, types)
        with root.attaching(self.session, module) as target:
            root.parameters = sum(p.numel() for p in module.parameters() if not is_lazy(p))
            root.modules = module_tree(module, root.label)
            if root.parameters and not any(r.parameters and r.target for r in self.roots if r is not root):
                self._leader.lead(target.passes, root.module)
            if not root.follows:
                self.roots.append(root)
            self._hook(module, root, fresh)
        if any(is_lazy(p) for p in module.parameters()):
            self._unfinished.append(root)
        target.held = None  # the program's models live as long as the program wants
        if self.holding is not None:
            self.holding.append(module)
        return root

    def _release_gone(self) -> None:
        """Let go of roots that are gone, before others have their place in memory."""
        gone = [r for r in self.roots if r.release(self.session)]
        for met in (self._known, self._places) if gone else ():
            met.forget_gone()

    def _hook(self, module: nn.Module, root: Root, fresh: Mapping[str, nn.Module]) -> None:
        action = Prefixed(self.meter, root)
        paths = [n for n, m in fresh.items() if runs(m) and selected(self.selector, root.label(n), m)]
        self.meter.channel_dims.update(channel_dims(module, fresh, root))
        for path, (how, numbers) in saturations(fresh, root).items():
            self.meter.saturates(path, how, numbers)
        for kind in ("out", "in", "out.grad"):
            self.session.hook_each(module, paths, kind, action)
        self._hook_parameters(module, root)

    def _hook_parameters(self, module: nn.Module, root: Root) -> None:
        fresh = [
            (name, param)
            for name, param in self._places.unplaced(module)
            if selected(self.selector, root.label(name), module)
        ]
        self._places.put(fresh, root)
        # Hooks on a parameter that is spread over several processes do not fire: its gradient is seen at the optimizer.
        chosen = [name for name, param in fresh if param.requires_grad and own_part(param) is param]
        self.session.hook_each(module, chosen, "param.grad", Prefixed(self.meter, root))
        for station in self.session.targets[id(module)].stations.values():
            station.param = None  # as with the module itself: they live as long as the program wants

    def _finish_lazy(self) -> None:
        """Hook the parameters that a first forward has given their shapes."""
        waiting, self._unfinished = self._unfinished, []
        for root in waiting:
            module = root.module()
            if module is not None:
                root.modules = module_tree(module, root.label)
                root.types.update((n, type(m).__name__) for n, m in module.named_modules() if n in root.types)
                self._hook_parameters(module, root)

    # -- steps -----------------------------------------------------------------------------------

    def _trains(self) -> bool:
        """Whether there is an optimizer, so that a pass without gradients is no part of a step."""
        clock = self.session.clock
        return clock.optimizer is not None or clock.awaited > 0

    def _pass_began(self, passes: Passes) -> None:
        """Decide whether this pass is measured: validation between training steps is not."""
        self.meter.muted = self._trains() and not passes.here.graded
        if self.pace.level is Level.FULL and not self.meter.muted:
            self.sampled.add(self.session.clock.step)

    def _stepped(self, step: int) -> None:
        """Hear that a step has ended; in most steps of a small model there is nothing else to do."""
        if time.perf_counter() >= self.pace.wake:
            self._end_step(step)

    def _step_ended(self, step: int) -> None:
        full, heard = self.pace.level is Level.FULL, (time.perf_counter(), self.cost())
        with self._timed():
            self._notes += self.survey.close(step)
            if self.dump is not None:
                self.dump.step_ended(self.lookout.spoiled or self.meter.spoiled())
            self.meter.flush(curves=self.pace.level is not Level.LOOK)
            if self._unfinished:
                self._finish_lazy()
            if full:
                self.levels.learn(self.roots)
            self._asleep.listen()
        self.pace.charge(self.meter.device_seconds)
        level = self.pace.ended(step, time.perf_counter(), self.cost(), heard)
        with self._timed():
            self.levels.prepare(level, scouts=self.pace.budget is None or leads_anew(self.session.clock, self.roots))

    def _updated(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Hear that an optimizer has stepped: the one hook that runs in steps that are not looked at, and finds memories cold."""
        asleep, leads = self._asleep, (leading := self._leader.leading) is not None and leading() is optimizer
        if leads and time.perf_counter() < self.pace.wake:  # Dynamo breaks its graph at a clock
            asleep.passed += 1
            return
        if torch.compiler.is_compiling():
            dynamo.break_graph()
        if leads:
            self._rise(optimizer)
            if asleep.slept:
                asleep.passed += 1
                return
        if asleep.wake():
            self._leader.led()
        if asleep.spoiled:
            self._tell(optimizer)
        if self.pace.level is Level.FULL:
            self._measure_update(optimizer)
        wished = self._leader.meets(optimizer) and self._met_new(optimizer)
        self._leader.count(optimizer, args, kwargs)
        if wished and self.pace.level is not Level.FULL and not in_backward():
            self._waken()

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.meter.level != OFF:
            with self._timed():
                light = self.pace.level is not Level.FULL
                spoiled = self.lookout.spoiled or (light and self.meter.spoiled())
                self.updates.before(optimizer, self.pace.level, spoiled=spoiled)

    def _after_update(self, optimizer: Optimizer) -> None:
        with self._timed():
            self.updates.after(optimizer)

    def _place_again(self, optimizer: Optimizer) -> None:
        """Let go of what is gone; watch what an optimizer holds where `torch.func` had put others in its place before."""
        self._release_gone()
        clock, held = self.session.clock, self.updates.holds(optimizer)
        for module, root in [] if held else [(root.module(), root) for root in self.roots]:
            if module is not None:
                self._hook_parameters(module, root)
        if not held and clock.optimizer is None and self.updates.holds(optimizer):
            clock.optimizer = id(optimizer), 0  # nobody else counts its steps

    def _met_new(self, optimizer: Optimizer) -> bool:
        """Take a new optimizer for a sign of a new model; tell whether to measure the next step in full for it."""
        self._meet(optimizer)
        return self.pace.level is not Level.FULL and self.pace.wish()

    # -- writing ---------------------------------------------------------------------------------

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:
        """Write one step, and before it the sites that are new; see `kedge.flow.Sink`."""
        seats = self.meter.seats.values()
        size = (len(seats), sum(len(seat.sources) for seat in seats))
        if size != self._written:
            self._written = size
            entries = [entry_of(seat, self.roots, self.survey.sources) for seat in seats]
            self.log.sites(entries, [root.entry() for root in self.roots])
        self.log.stats(step, columns)
        while self._notes:
            self.log.event(self._notes.pop(0))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the time of a block to what watching costs, without what the meter times itself."""
        start, inner = time.perf_counter(), self.meter.seconds
        try:
            yield
        finally:
            self.spent += time.perf_counter() - start - (self.meter.seconds - inner)


dynamo.untraced(Watch._updated)  # an optimizer's step may be compiled


def _abandon(watch: Watch | None) -> None:
    """In a forked child: the recording belongs to the parent."""
    if watch is not None:
        watch.meter.level = OFF
