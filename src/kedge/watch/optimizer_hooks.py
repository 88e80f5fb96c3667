"""The hooks on the steps of all optimizers."""

from __future__ import annotations

from typing import Any

from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from kedge.torch_internals import device_graphs, dynamo
from kedge.torch_internals.own_work import own_work
from kedge.watch.records.record import TrainingRecord
from kedge.watch.step_kinds import StepKinds
from kedge.watch.steps.shield import OFF, OPTIMIZER, WatchShield
from kedge.watch.training import Training


class OptimizerHooks:
    """Measures before and after the steps of optimizers, and counts them.

    Args:
        record: Receives the values.
        training: Learns which parameters an optimizer holds.
        kinds: Makes a step a guarded one if it is not finite.
        shield: Wraps the work.
    """

    def __init__(
        self, record: TrainingRecord, training: Training, kinds: StepKinds, shield: WatchShield
    ) -> None:
        self.record = record
        self.training = training
        self.kinds = kinds
        self.shield = shield
        self.steps = kinds.steps
        self.budget = kinds.budget
        passes = record.models.passes
        self.skipped = passes.skipped
        self._measure_before = shield.around(self._before_step, OPTIMIZER)
        self._measure_bad = shield.around(self._bad_step, OPTIMIZER)
        self._measure_after = shield.around(record.after_update, OPTIMIZER)
        self._count = shield.around(self.steps.count_update, OPTIMIZER)

    def install(self) -> tuple[RemovableHandle, ...]:
        """Install the hooks, and return their handles."""
        before = register_optimizer_step_pre_hook(self._about_to_step)
        after = register_optimizer_step_post_hook(self._stepped)
        return before, after

    def _about_to_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called before an optimizer steps; does nothing in a skipped step."""
        if not self.skipped.on and self.record.meter.level != OFF and not is_compiling():
            self._measure_before(optimizer, args, kwargs)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        entry = self.training.before_update(optimizer)
        closure = any(map(callable, (*args, *kwargs.values())))
        if self.record.before_update(optimizer, entry, closure=closure):
            self.kinds.interrupt()

    def measure_bad_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Measure what an optimizer is about to use, in a step that has just turned out to be bad.

        In a measured step all is measured already, and so it is where that was known before.
        """
        if not self.record.measured and not self.record.updates.bad:
            self._measure_bad(optimizer, args, kwargs)

    def _bad_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.skipped.on:
            self.kinds.interrupt_skipped()
        self.record.updates.backward_ended((optimizer,))
        self._before_step(optimizer, args, kwargs)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count an optimizer's step; see Note [Cold caches] in `kedge.watch.step`."""
        if not (self.shield.in_child or is_compiling()):
            self.record.steps_again.begin_after_step()
            self.record.kept.stepped(optimizer, measured=self.record.measured)
            if self.skipped.on and self.steps.count_skipped(optimizer):
                return
        if self.shield.in_child:
            unseen = self.record.facts.unseen
            unseen.stepped_in_child()
            return
        if is_compiling():
            dynamo.break_graph()
        if device_graphs.leaves_alone():
            return
        with own_work():
            self._count_step(optimizer)

    def _count_step(self, optimizer: Optimizer) -> None:
        is_last = self.budget.run == 1 and self.record.meter.level != OFF
        if is_last or id(optimizer) in self.record.updates.late:
            self._measure_after(optimizer)
        self._count(optimizer)


dynamo.untraced(OptimizerHooks._stepped)  # an optimizer's step may be compiled
