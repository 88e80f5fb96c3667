"""Watching a whole program: the models that it trains, the steps of their optimizers, and each backward pass.

# Note [Roots]
A root is a module that is called while no other watched one runs. It is found at its first call by a global
forward-pre hook and gets its hooks before its forward runs, so that a model handed to `torch.compile` is hooked before
it is compiled. The first root that an optimizer trains has the plain names - or, where there is no optimizer, the
first one that has parameters; those of others begin with their class name. As long as an optimizer
holds parameters of no root, new roots are looked for in every step; if none turns up, the modules that hold them are found
among all objects, and what no module holds is watched as tensors.
"""

from __future__ import annotations

import os
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from kedge.hooks.schedule import Passes
from kedge.sites.leaves import own_part
from kedge.sites.select import Selector, runs
from kedge.stderr import say
from kedge.store.rows import FULL, LIGHT
from kedge.torch_internals import dynamo, modes
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.source_lines import module_tree
from kedge.watch.backwards import BackwardPasses, Began, Reached, began
from kedge.watch.budget import Budget, StepKind, unit
from kedge.watch.by_hand import ByHand
from kedge.watch.curves import Curves
from kedge.watch.evaluation import NEVER, Evaluation
from kedge.watch.facts import Facts
from kedge.watch.first_step import FirstStep
from kedge.watch.losses import Losses
from kedge.watch.naming import prefix_of
from kedge.watch.optimizer_updates import Updates
from kedge.watch.optimizers import Optimizers, living, params_of
from kedge.watch.parked_hooks import StepHooks, WatchSession
from kedge.watch.roots import (
    Meter,
    Prefixed,
    Root,
    RunSink,
    Summary,
    channel_dims,
    free_prefix,
    next_of,
    saturations,
    selected,
    silences,
    unwrapped,
)
from kedge.watch.seen import Known, Places
from kedge.watch.unmet import holders_of, names_in_frames
from kedge.watch.writer import Writer

if TYPE_CHECKING:
    from kedge.hooks.dump import Dump

_PER_EVENT, _PER_STEP = 3.0, 12.0
"""What it takes to bring one event to the meter, and to count a step with cold caches, in calls of an empty module hook."""
_SEARCHES = 20
"""How often all parameters of an optimizer are hooked again."""
_PATIENCE = 3
"""How many steps of an optimizer to wait for the modules that its parameters belong to."""
OFF = 0


class Watcher:
    """Watches what a program does, while a ``with`` block lasts.

    Args:
        meter: What measures; it is told to pass its steps to this watcher's writer.
        log: Where records go.
        sites: A selector; outputs, gradients and parameters at the paths that it names are measured.
        n: After the first steps, one step in `n` is measured, or fewer if the budget does not pay for it.
        budget: The share of the program's time that watching may take; None for no limit.

    Attributes:
        dump: Set to what keeps the call that made the first value that is not finite.
        holding: Set to a list to have it keep the roots alive to the end.
        in_child: This is a forked child process, which only counts that it trains.
        failure: The error that Kedge failed with, and has watched nothing since; None where all goes well.
        names: Names of modules that may turn out to be roots, given by the model that holds them and is not called itself.
    """

    def __init__(
        self, meter: Meter, log: RunSink, *, sites: str = "**", n: int = 10, budget: float | None = None
    ) -> None:
        self.log, self.selector, self.budget = log, Selector(sites), Budget(n, budget)
        self.meter, meter.draws = meter, True
        self.session = WatchSession()
        self.roots: list[Root] = []
        self.places, self._known = Places(), Known()
        self.pid, self.in_child = os.getpid(), False
        self.sampled: set[int] = set()
        self.spent, self._charged = 0.0, 0.0
        self.failure: Exception | None = None
        self.holding: list[nn.Module] | None = None
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.dump: Dump | None = None
        clock = self.session.clock
        self.curves = Curves()
        self.updates = Updates(meter, self.curves, self.step, self.places.measured)
        self.optimizers = Optimizers(clock, self._trains)
        self.hooks, self.first_step = StepHooks(self.session), FirstStep()
        self.losses, self.facts = Losses(meter, self.curves), Facts()
        self._passes = BackwardPasses(
            self._spare(self._backward_began), self._spare(self._backward_ended), self._spare(self._alarmed)
        )
        self.writer = Writer(log, meter, self.curves, self.roots, self.optimizers, self._sources)
        meter.sink = self.writer
        self._undo = ExitStack()
        self.by_hand = ByHand(self._trains, self._in_training)
        self.evaluation = Evaluation(clock, meter, self.optimizers, self.roots)
        self._device_seconds = 0.0
        self._unmet: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._unfinished: list[Root] = []
        self._unit, self._began = 0.0, time.perf_counter()
        self._before, self._after = self._spare(self._before_update), self._spare(self._after_update)
        self._enter = self._spare(self._entered)
        self._passes.passed = self._spare(self._count_backward)
        clock.counters = []
        clock.on_step[:] = [self._spare(self._run_ended)]  # when a site fires is decided by the kind of step
        clock.on_pass.append(self._spare(self._pass_began))

    def __enter__(self) -> Self:
        """Begin to watch."""
        self._unit = unit()
        scout = register_module_forward_pre_hook(self._scout)
        self.hooks.take_scout(scout)
        self._undo.callback(scout.remove)
        ahead = register_optimizer_step_pre_hook(self._before)
        behind = register_optimizer_step_post_hook(self._updated)
        self._undo.callback(ahead.remove)
        self._undo.callback(behind.remove)
        self._undo.callback(self.hooks.close)
        self._undo.callback(self._passes.close)
        self._undo.callback(self.losses.lines.end)
        self.budget.begin(time.perf_counter())
        self.optimizers.begin()
        self.facts.begin(ahead, behind)
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
            self.first_step.close(0)
            if self.dump is not None:
                self.dump.close()
            self._undo.close()
            self.session.end(quiet=True)

    def _write_last(self) -> None:
        clock = self.session.clock
        with self._timed():
            partial = self.optimizers.leading is not None and not self._is_bad()
            if partial:  # what came after the last step is no step: an evaluation, or half a round
                self.meter.drop()
            self.writer.notes += self.first_step.close(clock.step)
            vain = self.by_hand.in_vain
            self.writer.notes += self.facts.at_end(self.optimizers, self.roots, self.places, self._passes, in_vain=vain)
            if partial:
                self.curves.drop(clock.step)
            self.writer.write_curves(clock.step)
            self.meter.finish()
        if self.roots and not self.meter.seats:
            self.writer.notes.clear()
        self.writer.write_sites(again=True)  # how many steps each root was trained for is known now
        self.writer.write_notes()
        silent = silences(self.roots, self.session.taps) + self.facts.unused(self.places, self._passes)
        self.log.event({"kind": "ledger", "sampled": self.summary.sampled, "sites": silent})

    @property
    def failed(self) -> bool:
        """Whether Kedge has failed."""
        return self.failure is not None

    def step(self) -> int:
        """Return the step under way."""
        return self.session.clock.step

    @property
    def summary(self) -> Summary:
        """What came out so far."""
        clock, counts = self.session.clock, self.budget.counts
        levels = {kind.name.lower(): counts[kind] for kind in reversed(StepKind)}
        steps = clock.led if clock.optimizer is None and not self.by_hand.leads else self.step()
        under_way = steps > self.step()  # it counts from its beginning, where forward passes are the steps
        levels[self.budget.kind.name.lower()] += self.budget.done + under_way
        sampled = len(self.sampled) + (under_way and self.budget.kind is StepKind.MEASURED)
        passed = time.perf_counter() - self._began
        took = min(self.budget.seconds + self.cost() - self._charged, passed)  # part of it is estimated
        return Summary(len(self.meter.seats), steps, sampled, passed, took, levels, self.failed)

    def cost(self) -> float:
        """Return the seconds that watching took: measuring and writing are timed, PyTorch's calls of hooks are calibrated."""
        called = _PER_EVENT * self.meter.events + _PER_STEP * self.session.clock.step
        return self.spent + self.meter.seconds + self.first_step.seconds + called * self._unit

    # -- roots -----------------------------------------------------------------------------------

    def _spare(self, work: Callable[..., None]) -> Callable[..., None]:
        """Make a hook that never ends the program: if Kedge fails, it says so once and steps aside."""

        def hook(*args: Any) -> None:
            if torch.compiler.is_compiling() or self.failed or os.getpid() != self.pid or modes.is_under_jit():
                return
            try:
                with self.meter.lock:  # the program may train in several threads
                    work(*args)
            except Exception as error:  # noqa: BLE001 - it is the user's program that runs around this
                error.add_note(traceback.format_exc())  # the traceback itself would keep what it went through
                self.failure, self.meter.level = error.with_traceback(None), OFF
                say(f"internal error, watching stops here: {type(error).__name__}: {error}")

        return hook

    def _scout(self, module: nn.Module, args: Any) -> None:
        """See every module call of the program: few are of modules that have not been met."""
        if not torch.compiler.is_compiling() and module not in self._known:
            self._enter(module, args)

    def _entered(self, module: nn.Module, args: Any) -> None:
        """See the first call of a module; that of a root makes it watched."""
        if not self.hooks.scouting or module in self._known or self._known.is_aside(module) or in_backward():
            return
        self._known.meet([module])
        if isinstance(module, torch.jit.ScriptModule):
            return  # PyTorch runs no hooks on it
        inner = unwrapped(module)
        if inner is not module and inner in self._known:
            return  # it was called before it was wrapped
        captured = isinstance(module, torch.fx.GraphModule) and dynamo.has_compiled()  # a graph, not the user's module
        if captured:
            return
        running = next((root for root in self.roots if root.is_running), None)
        if running is not None:
            self._known.meet(module.modules())
            self.facts.called_inside(module, running)
        else:
            with self._timed():
                root = self._watch(inner)
                if self.dump is not None:
                    self.dump.watch(inner, root.label, begun=inner is module)
                if inner is module and not root.follows:
                    self.first_step.add(module, root)
            self._begin_first(module, args)

    def _begin_first(self, module: nn.Module, args: Any) -> None:
        """Start the current call by hand: PyTorch had already collected its hooks before ours were registered."""
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
        self._release_gone()
        root = next_of(self.roots, types) or Root(len(self.roots), prefix_of(module, self.roots, self.names), types)
        with root.attaching(self.session, module) as target:
            root.parameters = sum(p.numel() for p in module.parameters() if not is_lazy(p))
            root.modules = module_tree(module, root.label)
            self._let_lead(root, target.passes)
            if not root.follows:
                self.roots.append(root)
            self._hook(module, root, fresh)
        if any(is_lazy(p) for p in module.parameters()):
            self._unfinished.append(root)
        self._adopt_for(module)
        target.held = None  # the program's models live as long as the program wants
        if self.holding is not None:
            self.holding.append(module)
        return root

    def _let_lead(self, root: Root, passes: Passes) -> None:
        """Let a root's forward passes be the steps as long as no optimizer makes them."""
        clock = self.session.clock
        if self.by_hand.leads:
            return
        if root.parameters and not any(r.parameters and r.target for r in self.roots if r is not root):
            if clock.awaited == NEVER:
                clock.led = 0
            self.optimizers.let_passes_lead(passes, root.module)
        elif clock.leader is passes:  # a transform, called before the model: its passes are no steps
            clock.looked, clock.awaited = True, NEVER

    def _release_gone(self) -> None:
        """Let go of roots that are gone, before others have their place in memory."""
        gone = [r for r in self.roots if r.release(self.session)]
        for met in (self._known, self.places, self._passes) if gone else ():
            met.forget_gone()

    def _hook(self, module: nn.Module, root: Root, fresh: Mapping[str, nn.Module]) -> None:
        action = Prefixed(self.meter, root)
        paths = [n for n, m in fresh.items() if runs(m) and selected(self.selector, root.label(n), m)]
        self.meter.channel_dims.update(channel_dims(module, fresh, root))
        for path, (how, numbers) in saturations(fresh, root).items():
            self.meter.saturates(path, how, numbers)
        for kind in ("out", "in", "out.grad"):
            self.session.hook_each(module, paths, kind, action)
        if any(own_part(param) is not param for param in module.parameters()):
            self.session.hook_each(module, [""], "out.grad", Reached(self._passes, root))
        self._place_parameters(module, root)

    def _place_parameters(self, module: nn.Module, root: Root) -> None:
        fresh = self.places.unplaced(module)
        self.places.put(fresh, root, lambda path: selected(self.selector, path, module))
        # Hooks on a parameter that is spread over several processes do not fire: its gradient is seen at the optimizer.
        self._passes.listen(param for _, param in fresh if own_part(param) is param)

    def _finish_lazy(self) -> None:
        """Watch the parameters that a first forward has given their shapes."""
        waiting, self._unfinished = self._unfinished, []
        for root in waiting:
            module = root.module()
            if module is not None:
                root.modules = module_tree(module, root.label)
                root.types.update((n, type(m).__name__) for n, m in module.named_modules() if n in root.types)
                self._place_parameters(module, root)

    # -- optimizers --------------------------------------------------------------------------------

    def _adopt(self, optimizer: Optimizer) -> None:
        """Find out what an optimizer trains: when it steps first, and when it holds other parameters than before."""
        self._release_gone()
        entry = self.optimizers.entry(optimizer)
        for root in self.roots:  # what `torch.func` had put others in the place of, and what came later
            module = root.module()
            if module is not None:
                self._place_parameters(module, root)
        self.updates.learn(optimizer)
        trained = {id(found[1]): found[1] for p in params_of(optimizer) if (found := self.places.of(p)) is not None}
        for root in trained.values():
            root.optimizers.add(entry.index)
            entry.roots.add(root.index)
        self._listen_again(optimizer)
        if any(self.places.of(p) is None for p in params_of(optimizer)):
            self._unmet.setdefault(optimizer, 0)
        else:
            self._unmet.pop(optimizer, None)
        self.budget.wish()

    def _listen_again(self, optimizer: Optimizer) -> None:
        """Hook all that an optimizer holds: when it is new, or steps though no backward pass was seen to reach it."""
        entry = self.optimizers.entry(optimizer)
        if entry.searches < _SEARCHES:
            entry.searches += 1
            own = [p for p in params_of(optimizer) if self.places.of(p) is not None and own_part(p) is p]
            self._passes.listen(own, again=True)

    def _adopt_for(self, module: nn.Module) -> None:
        """Find out anew what the optimizers train that stepped, or began to, before their model was met."""
        own = {id(p) for p in module.parameters()} if self.optimizers.entries else set()
        for optimizer in self.optimizers.known().values():
            if any(id(p) in own for p in params_of(optimizer)):
                self._adopt(optimizer)

    def _trains(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds a parameter of a root."""
        return any(self.places.of(param) is not None for param in params_of(optimizer))

    def _in_training(self) -> bool:
        """Whether a root is in training mode."""
        return any(module.training for root in self.roots if (module := root.module()) is not None)

    def _meet_holders(self, optimizer: Optimizer) -> None:
        """Watch what an optimizer holds that belongs to no root: modules that are not called, or tensors alone."""
        unmet = [p for p in params_of(optimizer) if self.places.of(p) is None and p.grad is not None]
        for module in holders_of(unmet):
            if module not in self._known and not isinstance(module, torch.jit.ScriptModule):
                self._watch(module)
        rest = [p for p in unmet if self.places.of(p) is None]
        if rest:
            prefix = "" if all(root.prefix for root in self.roots) else free_prefix("tensors", self.roots)
            root = Root(len(self.roots), prefix, {"": "tensors"}, sum(p.numel() for p in rest))
            self.roots.append(root)
            named = zip(names_in_frames(rest), rest, strict=True)
            self.places.put(named, root, lambda path: selected(self.selector, path, nn.Module()))
            self._passes.listen(rest)
        self._adopt(optimizer)

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.meter.level == OFF:
            return
        start, inner = time.perf_counter(), self.meter.seconds
        if self.optimizers.entry(optimizer).grew(optimizer):
            self._adopt(optimizer)
        if self._unmet and optimizer in self._unmet:
            self._unmet[optimizer] += 1
            waits = self._unmet[optimizer] < _PATIENCE
            if not waits or (not self.roots and any(p.grad is not None for p in params_of(optimizer))):
                self._meet_holders(optimizer)
            if not waits:
                self._unmet.pop(optimizer, None)
        if self.budget.kind is StepKind.MEASURED:
            entry = self.optimizers.entry(optimizer)
            self.writer.notes += self.facts.before_step(self.step(), optimizer, entry.index)
        bad = self.updates.bad
        if not self.updates.was_reached(optimizer):
            self._listen_again(optimizer)
        self.updates.before(optimizer, closure=any(map(callable, (*args, *kwargs.values()))))
        if self.updates.bad and not bad and self.budget.kind is StepKind.GUARDED:
            self.budget.interrupt(time.perf_counter())
        self.spent += time.perf_counter() - start - (self.meter.seconds - inner)

    def _updated(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count an optimizer's step: the one hook that runs in skipped steps, and finds caches cold."""
        if self.in_child:
            self.facts.stepped_in_child()
            return
        budget = self.budget
        if budget.run > 1:
            if id(optimizer) in self.updates.late:
                self._after(optimizer)
            if self.optimizers.stepped(optimizer):
                self._end_step_of_run()
            return
        if torch.compiler.is_compiling():
            dynamo.break_graph()
        self._after(optimizer)
        if self.optimizers.stepped(optimizer) and not self.failed:
            self.session.clock.optimized()

    def _after_update(self, optimizer: Optimizer) -> None:
        if self.meter.level != OFF:
            with self._timed():
                self.updates.after(optimizer)
                if self.budget.kind is StepKind.MEASURED:
                    self.facts.stepped(optimizer)

    # -- passes ------------------------------------------------------------------------------------

    def _pass_began(self, passes: Passes) -> None:
        self.evaluation.began(passes)

    def _backward_began(self, at: Began) -> None:
        if not self.meter.seats and not any(self.places.measured(p) for p, _, _ in self.places):
            return  # none of the sites to be watched is here
        start = time.perf_counter()
        measured = self.budget.kind is StepKind.MEASURED
        bad = self.losses.bad
        self.writer.notes += self.losses.began(at, self.step(), measured=measured)
        if measured:
            self.writer.notes += self.facts.backward_began(self.step(), self.roots, self._passes)
        elif self.losses.bad and not bad:
            self.budget.interrupt(time.perf_counter())
            self.updates.bad = True  # all gradients and parameters of this step are measured
        self.spent += time.perf_counter() - start

    def _alarmed(self) -> None:
        """Guard the step under way, which was to be skipped: its loss is not finite."""
        self.budget.interrupt(time.perf_counter())
        self._begin_step(StepKind.GUARDED)

    def _backward_ended(self, task: int) -> None:
        if self.meter.level != OFF:
            start, inner, bad = time.perf_counter(), self.meter.seconds, self.updates.bad
            known = {id(optimizer): optimizer for optimizer in self.optimizers.known().values()}
            if self.optimizers.leading is None:  # some may not have stepped yet
                known |= {id(o): o for o in living() if self._trains(o)}
            self.updates.backward_ended(o for o in known.values() if self._passes.reached_by(task, params_of(o)))
            if self.updates.bad and not bad:
                self.writer.notes += self.losses.gradients_are_bad(
                    began(), self.step(), measured=self.budget.kind is StepKind.MEASURED
                )
            if self.budget.kind is StepKind.MEASURED:
                self.facts.backward_ended(self._passes)
            self.spent += time.perf_counter() - start - (self.meter.seconds - inner)
        self._count_backward()

    def _count_backward(self) -> None:
        """Count a backward pass as a step, where no optimizer makes them."""
        if self.optimizers.entries:
            self._passes.passed = None
            return
        if self.by_hand.passed():
            self.session.clock.awaited = NEVER
            if self.budget.run > 1:
                self._end_step_of_run()
            else:
                self.session.clock.end_step()

    # -- steps -------------------------------------------------------------------------------------

    def _is_bad(self) -> bool:
        """Whether something in the step under way is known not to be finite."""
        return self.losses.bad or self.updates.bad or self.meter.spoiled()

    def _run_ended(self, step: int) -> None:
        """Write what was seen in the last steps, and prepare the next ones."""
        if self.budget.kind is StepKind.SKIPPED:
            self._begin_step(self.budget.run_ended(step, time.perf_counter(), 0.0))
            return
        measured = self.budget.kind is StepKind.MEASURED
        with self._timed():
            bad = self._is_bad()
            self.writer.notes += self.first_step.close(step)
            if self.dump is not None:
                self.dump.step_ended(bad)
            if self._unfinished:
                self._finish_lazy()
            if measured:
                self.sampled.add(step)
                self.hooks.gather(self.roots)
                self._passes.keep_first(self._groups)
                self.facts.step_ended(self.optimizers, self.roots, self.places, self._passes)
            self.meter.flush(finite=not (measured or bad))
            if measured or bad or self.curves.is_due():
                self.writer.write_curves(step)
            if bad and not measured:
                self.budget.wish()
        self.budget.charge_device(self.meter.device_seconds - self._device_seconds)
        self._device_seconds = self.meter.device_seconds
        self._begin_step(self.budget.run_ended(step, time.perf_counter(), self._since_last()))

    def _groups(self) -> list[Iterable[Tensor]]:
        """The parameters of each root, and of each optimizer."""
        return [*self.places.by_root(), *map(params_of, self.optimizers.known().values())]

    def _end_step_of_run(self) -> None:
        """Count a step that others of its kind follow."""
        self.budget.run -= 1
        self.session.clock.step += 1
        self.updates.forget_step()

    def _since_last(self) -> float:
        cost = self.cost()
        since, self._charged = cost - self._charged, cost
        return since

    def _begin_step(self, kind: StepKind) -> None:
        self.evaluation.begin_step()
        with self._timed():
            self.losses.bad = False
            self.losses.lines.end()
            if kind is StepKind.MEASURED and self.optimizers.entries and not dynamo.has_compiled():
                self.losses.lines.begin()
            self.updates.begin(measured=kind is StepKind.MEASURED)
            if kind is not StepKind.MEASURED:
                self.facts.forget_gradients()
            self.meter.level = {StepKind.MEASURED: FULL, StepKind.GUARDED: LIGHT, StepKind.SKIPPED: OFF}[kind]
            self._passes.quick = kind is StepKind.SKIPPED
            looking = self.budget.share is None or bool(self._unmet) or not self.optimizers.entries
            self.hooks.prepare(measured=kind is StepKind.MEASURED, scouting=looking)

    def _sources(self) -> dict[str, Any]:
        return {**self.first_step.sources, **self.losses.described}

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the time of a block to what watching costs, without what the meter times itself."""
        start, inner = time.perf_counter(), self.meter.seconds
        try:
            yield
        finally:
            self.spent += time.perf_counter() - start - (self.meter.seconds - inner)


dynamo.untraced(Watcher._updated)  # an optimizer's step may be compiled


def _abandon(watcher: Watcher | None) -> None:
    """In a forked child: the recording belongs to the parent."""
    if watcher is not None:
        watcher.meter.level, watcher.in_child = OFF, True
