"""Makes each step a measured, guarded or skipped one, as the budget pays for it."""

from __future__ import annotations

from time import perf_counter
from typing import Protocol

from torch.utils.hooks import RemovableHandle

from kedge.hooks.firing.schedule import PassCounter
from kedge.store.events import CompiledEvent
from kedge.torch_internals import dynamo
from kedge.watch.models.parked_hooks import StepHooks
from kedge.watch.records.module_times import ModuleTimes
from kedge.watch.records.record import TrainingRecord
from kedge.watch.step import Step, StepKind
from kedge.watch.steps.compiled_steps import CodeVariants, CompiledSteps
from kedge.watch.steps.evaluation import Evaluation, Rehearsals
from kedge.watch.steps.shield import WatchShield
from kedge.watch.steps.steps import Steps, StepSource
from kedge.watch.training import Training


class StepHandler(Protocol):
    """What prepares for each step."""

    def begin_step(self, step: Step) -> None:
        """Prepare for a step."""


class StepKinds:
    """Prepares each step for its kind, which the budget chose.

    See Note [Three kinds of steps] in `kedge.watch.step`.

    Attributes:
        hooks: The hooks that only some kinds of steps need.
        costs: The cost of watching.
        compiled: Decides which hooks compiled code keeps.
        evaluation: Decides which forward passes of a step are measured.
        rehearsals: Recognizes forward passes on memory that holds nothing.
    """

    def __init__(
        self, steps: Steps, record: TrainingRecord, training: Training, shield: WatchShield
    ) -> None:
        self.steps = steps
        self.budget = steps.budget
        self.record = record
        self.training = training
        self.costs = shield.costs

        models = record.models
        self.hooks = StepHooks(models.session)
        variants = CodeVariants(self.hooks.place, shield)
        self.compiled = CompiledSteps(models.session, self.budget, self.costs, variants)
        self.evaluation = Evaluation(record.meter, models.roots)
        self.rehearsals = Rehearsals()
        self._handlers: tuple[StepHandler, ...] = (
            self.evaluation,
            record,
            models.passes,
            self.hooks,
            models.outside,
        )
        self._compiled_noted = False

    def time_modules(self) -> None:
        """Have the modules timed in measured steps."""
        times = self.record.times = ModuleTimes(self.record.models.roots)
        # Last, so that its hooks stand around those of all others.
        self._handlers = (*self._handlers, times)

    def begin(self, finder: RemovableHandle) -> None:
        """Begin with the first step, and take over the hook that finds roots."""
        self.costs.begin()
        self.hooks.take_finder(finder)
        self.budget.begin(perf_counter(), self.costs.per_step)

    def close(self) -> None:
        """Remove what would outlast the watch."""
        self.compiled.variants.close()
        self.hooks.close()

    def run_ended(self, step: int) -> None:
        """Write the values of the last steps, and prepare the next ones."""
        budget = self.budget
        timed = self.compiled.charge(measured=budget.kind is StepKind.MEASURED)
        try:
            if budget.kind is not StepKind.SKIPPED:
                self._write(step)
        except Exception:
            self.record.forget(step)  # what is left of it would be taken for all
            raise
        finally:
            if budget.kind is not StepKind.SKIPPED:
                budget.charge_device(self.costs.charge_device())
            # Else what the checks of skipped steps take would be taken for the next step's cost.
            timed += self.costs.charge()
            self._begin_step(budget.run_ended(step, perf_counter(), timed))

    def _write(self, step: int) -> None:
        measured = self.budget.kind is StepKind.MEASURED
        if measured:
            self.hooks.gather()
        if self.record.end_step(step) and not measured:
            self.budget.wish()
        self._note_compiled(step)

    def _note_compiled(self, step: int) -> None:
        """Note, once, that code of the program is compiled: calls in it cannot be kept."""
        if not self._compiled_noted and dynamo.has_compiled():
            self._compiled_noted = True
            log = self.record.writer.log
            log.event(CompiledEvent(step=step))

    def pass_began(self, passes: PassCounter, *, graded: bool) -> None:
        """Decide whether a root's forward pass that has begun is measured."""
        if self.rehearsals.ended():
            self.record.forget(self.steps.step)
        self.evaluation.began(passes, self.steps.by, graded=graded)
        self.record.models.outside.pass_began()

    def interrupt(self) -> None:
        """Make the current step a guarded one, as something in it is not finite.

        It may be in the middle of a run.
        """
        self.budget.interrupt(perf_counter(), self.costs.charge)

    def interrupt_skipped(self) -> None:
        """Make the current skipped step a guarded one, as its loss or a gradient is not finite."""
        self.interrupt()
        self._begin_step(StepKind.GUARDED)

    def look_closer(self) -> None:
        """Measure the next step, as it is news that an earlier one was not finite."""
        self.budget.wish()
        self.budget.cut()

    def _begin_step(self, kind: StepKind) -> None:
        """Pass a step through its handlers, in their order."""
        has_stepped = bool(self.steps.optimizers.entries)
        has_all = has_stepped and not self.training.without_root
        step = Step(
            kind,
            finding=not has_all or not self.budget.is_limited,
            hooked=self.compiled.keeps_hooks(measured=kind is StepKind.MEASURED),
            by_passes=self.steps.by is not StepSource.OPTIMIZER,
        )
        for handler in self._handlers:
            handler.begin_step(step)
