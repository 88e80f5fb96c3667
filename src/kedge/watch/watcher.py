"""Watches a whole program: its models, the steps of their optimizers, and each backward pass.

Five kinds of hooks report what the program does: a module is called, a root's forward begins, a
backward pass begins or ends, an optimizer is about to step, an optimizer has stepped.
`kedge.watch.models.models` and `kedge.watch.training` decide which models and parameters are
watched, `kedge.watch.steps.steps` decides which of these events end a step, and
`kedge.watch.step_kinds` how much is measured in one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from kedge.actions.measure.meter import Meter
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.roots import new_hooks
from kedge.logged import receivers
from kedge.sites.select import Selector
from kedge.sites.spread import averaged_over
from kedge.stderr import say
from kedge.store.events import LedgerEvent, LedgerLine
from kedge.torch_internals import dynamo
from kedge.torch_internals.hook_tables import before_forward
from kedge.torch_internals.module_tables import modules_in
from kedge.watch.acting.acting import Acting
from kedge.watch.alone.observer import TensorProgram
from kedge.watch.models.backward_start import BackwardStart
from kedge.watch.models.models import Models
from kedge.watch.models.optimizers import Optimizers
from kedge.watch.models.parameters import WatchedParameters
from kedge.watch.models.parked_hooks import WatchSession
from kedge.watch.models.roots import WantedSites
from kedge.watch.optimizer_hooks import OptimizerHooks
from kedge.watch.records.first_step import FirstStep
from kedge.watch.records.record import TrainingRecord
from kedge.watch.records.writer import StepSink
from kedge.watch.step import StepKind
from kedge.watch.step_kinds import StepKinds
from kedge.watch.steps.budget import Budget
from kedge.watch.steps.costs import Costs
from kedge.watch.steps.shield import BACKWARD, OFF, STEP, WatchShield, stop_in_children
from kedge.watch.steps.steps import Steps, StepSource
from kedge.watch.totals import WatchSummary
from kedge.watch.training import Training

_TENSORS = "its tensors"


class Watcher:
    """Watches a program during a ``with`` block.

    Args:
        meter: Measures; it passes its steps to this watcher's writer.
        log: Receives the records.
        sites: A selector; outputs, gradients and parameters at the paths that it names are
            measured.
        n: After the first steps, one step in `n` is measured, or fewer if the budget does not pay
            for it.
        budget: The share of the program's time that watching may take; None for no limit.

    Attributes:
        acting: What is done at findings; None if nothing is ordered.
        tensors: What the program does before it calls a module, once that has begun.
    """

    def __init__(
        self,
        meter: Meter,
        log: StepSink,
        *,
        sites: str = "**",
        n: int = 10,
        budget: float | None = None,
    ) -> None:
        meter.draws = True
        places = WatchedParameters()
        optimizers = Optimizers(places, self.step)
        wanted = WantedSites(Selector(sites), say)
        self.budget = Budget(n, budget, optimizers.until_own)
        self.costs = Costs(meter, lambda: self.session.measuring, self._timed_elsewhere)
        self.shield = shield = WatchShield(meter, self.costs)
        self.steps = Steps(optimizers, self.budget, self)
        self.session: WatchSession = WatchSession(self.steps, shield.lose)
        self.models: Models = Models(self.session, meter, wanted, places, self)
        self.record = record = TrainingRecord(
            log, meter, self.models, optimizers, self.step, FirstStep()
        )
        self.training = Training(self.models, record.updates, self.steps)
        self.kinds = StepKinds(self.steps, record, self.training, shield)
        self.updates = OptimizerHooks(record, self.training, self.kinds, shield)
        self.acting: Acting | None = None
        self.tensors = TensorProgram(shield.attempt, self.training.watch_leaves)
        self._undo = ExitStack()
        self._final: WatchSummary | None = None

        # As the handler of the steps and of the backward passes.
        around = shield.around
        self.pass_began = around(self._pass_began, STEP)
        self.step_of_run_ended = record.updates.forget_step
        self.backward_began = around(self._backward_began, BACKWARD)
        self.backward_ended = around(self._backward_ended, BACKWARD)
        self.skipped_began = around(self._skipped_began, BACKWARD)
        self.skipped_unread = record.losses.forget_last
        self.skipped_gradients = around(record.skipped_gradients, BACKWARD)
        self.skipped_backward_ended = around(self._count_backward, BACKWARD)
        self.skipped_is_bad = around(self.kinds.interrupt_skipped, STEP)
        self.steps.on_step.append(around(self.kinds.run_ended, STEP))
        # Of its own hook, and of a root that comes to its end.
        self._on_first_call = around(self._first_call, "the model")
        self._on_last_sight = around(record.exam.examine, STEP)
        # As the receiver of what the program logs.
        self.log = around(self._log, "what the program logs")

    def _timed_elsewhere(self) -> float:
        """Return the seconds of watching that no block of the costs and no hook has timed."""
        record = self.record
        lines = record.losses.lines
        seconds = record.first_step.seconds + self.models.passes.seconds + lines.seconds
        seconds += self.tensors.seconds + self.costs.operations(self.models.outside.passed)
        if self.acting is not None:
            seconds += self.acting.seconds
        if record.times is not None:
            seconds += record.times.seconds
        return seconds

    def __enter__(self) -> Self:
        """Begin to watch."""
        finder = register_module_forward_pre_hook(self._module_called)
        updates = self.updates.install()
        acting: Iterable[RemovableHandle] = ()
        if self.acting is not None:
            acting = self.acting.install()
            self._undo.callback(self.acting.close)
        for handle in (finder, *updates, *acting, *self.record.kept.install()):
            self._undo.callback(handle.remove)
        self._undo.callback(self.models.passes.close)
        self._undo.callback(self.record.close)
        self.kinds.begin(finder)
        self._undo.callback(self.kinds.close)
        self.steps.optimizers.begin()
        self.shield.attempt("operations outside of modules", self.models.outside.begin)
        receivers.append(self)
        self._undo.callback(receivers.remove, self)
        facts = self.record.facts
        facts.unseen.begin(*updates)
        stop_in_children(self.shield)
        return self

    def join_call(self, module: nn.Module, args: Any) -> None:
        """Take part in a call of a module that has begun already.

        PyTorch had collected its hooks before ours were there.
        """
        self._module_called(module, args)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        """Write the rest, and remove every hook."""
        if os.getpid() != self.shield.pid:
            return
        try:
            of_tensors = self.shield.attempt(_TENSORS, self.tensors.end, "end")
            silent = self.shield.alone(self._end)
            self.record.writer.write_of_tensors(of_tensors or ())
            ledger = LedgerEvent(sampled=self.summary.sampled, sites=tuple(silent))
            log = self.record.writer.log
            log.event(ledger)
        finally:
            self._undo.close()
            self.session.end(quiet=True)
            self._release()

    def _release(self) -> None:
        """Drop what was kept for each module, parameter and site.

        The parts of a watch hold each other. Of thousands of modules, Python's search for garbage
        would take seconds to find that nobody needs them. What the end of a run asks for stays.
        """
        self._final = self.summary
        self.session.release()
        self.models.release()
        self.record.release()

    def _end(self) -> list[LedgerLine]:
        """Write the rest; another thread may still train, but its work is over.

        Returns the entries of the ledger.
        """
        self.shield.over = True
        self.record.meter.level = OFF
        return self.record.end(self.shield)

    @property
    def failed(self) -> bool:
        """Whether something could not be watched."""
        return self.shield.failure is not None

    def step(self) -> int:
        """Return the number of the current step."""
        return self.steps.step

    @property
    def summary(self) -> WatchSummary:
        """The figures so far; at last those of the end."""
        if self._final is not None:
            return self._final
        budget = self.budget
        counts = dict(budget.counts)
        counts[budget.kind] += budget.done
        steps = self.steps.begun
        if steps > self.step():
            # Where forward passes are the steps, a step counts from its beginning.
            counts[budget.kind] += 1

        passed = self.costs.passed
        took = budget.seconds + budget.counting + self.costs.uncharged
        sites = self.record.meter.sites
        line = self.tensors.left_alone
        left_alone = ""
        if line is not None:
            left_alone = f"{line}: {line.text}"
        return WatchSummary(
            sites=len(sites.seats),
            steps=steps,
            sampled=counts[StepKind.MEASURED],
            seconds=passed,
            watching=min(took, passed),  # part of it is estimated
            levels={kind.name.lower(): counts[kind] for kind in reversed(StepKind)},
            failed=self.failed,
            left_alone=left_alone,
        )

    def _log(self, values: Mapping[str, Any]) -> None:
        """Record numbers that the program logs, of the step that they belong to; see `kedge.log`."""
        step = self.step()
        has_begun = self.steps.by < StepSource.BACKWARD or self.record.losses.recorded == step
        if not has_begun:
            step = max(step - 1, 0)
        for name, value in values.items():
            self.record.logged.add(step, name, value)

    # -- forward ----------------------------------------------------------------------

    def _module_called(self, module: nn.Module, args: Any) -> None:
        """Called before every module call of the program.

        Passes on those of modules not seen before.
        """
        if not torch.compiler.is_compiling() and module not in self.models.known:
            self._on_first_call(module, args)

    def _first_call(self, module: nn.Module, args: Any) -> None:
        """Called at the first call of a module; starts to watch it if it is a root."""
        if not self.kinds.hooks.finding:
            return
        models, record = self.models, self.record
        inner = models.candidate(module)
        if self.tensors.is_on and (inner is not None or isinstance(module, torch.jit.ScriptModule)):
            record.writer.notes += self.tensors.end("module")
            models.forget_tensors()
        if inner is None:
            return
        running = models.running()
        if running is not None:
            models.known.add(modules_in(module).values())
            record.facts.unoptimized.called_inside(module, running)
            return

        known = set(before_forward(module))
        root = self.training.watch(inner)
        missed = new_hooks(module, known)
        root.averaged = averaged_over(module)

        attempt = self.shield.attempt
        attempt("the end of its training", record.exam.begin, inner, root, self._on_last_sight)
        attempt("its passes", record.facts.passes.follow, module, root, self.shield)
        inside = f"the calls inside {type(module).__name__}"
        has_begun = inner is module
        if record.dump is not None:
            attempt(inside, record.dump.watch, inner, root.label, begun=has_begun)
        if has_begun:
            # PyTorch had collected the hooks of this call before ours were registered.
            if not root.hooks.follows:
                attempt(inside, record.first_step.add, module, root)
            if root.hooks.hooked is not None:
                root.hooks.hooked.begin_call(module, args, missed)

    def _pass_began(self, passes: PassCounter, graded: bool) -> None:
        self.steps.count_pass(passes, graded)
        self.models.passes.renew()
        self.kinds.pass_began(passes, graded=graded)

    # -- backward ---------------------------------------------------------------------

    def _backward_began(self, at: BackwardStart) -> None:
        if self.record.backward_began(at):
            self.kinds.interrupt()

    def _skipped_began(self, loss: torch.Tensor, number: Any, frame: FrameType) -> None:
        if self.record.skipped_began(loss, number, frame):
            self.kinds.look_closer()

    def _backward_ended(self, task: int) -> None:
        try:
            if self.record.meter.level != OFF:
                self.record.backward_ended(task)
        finally:
            self._count_backward()

    def _count_backward(self) -> None:
        """Count a backward pass as long as no optimizer has stepped."""
        if self.steps.optimizers.entries:
            self.models.passes.counts = False
            return
        waiting = self.steps.count_backward()
        if waiting and not self.models.in_training():
            waiting = []
        unstepped = self.record.facts.unstepped
        unstepped.count_backward(self.steps.backward_passes, waiting)


# Of a module that is compiled in place it is no part of the compiled code.
dynamo.untraced(Watcher._module_called)
