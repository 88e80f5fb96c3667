"""The events that end the steps of a run: updates of an optimizer, else backward or forward passes.

# Note [What makes the steps]
* NOTHING: no model with parameters was called. The passes of a transform are not steps.
* FORWARD: each forward pass of a model is a step: of the first one with parameters, or the next
  after its deletion.
* EXPECTED: the same model, but an optimizer may belong to it. While patience lasts, its passes are
  not steps.
* BACKWARD: each backward pass is a step. There was one, and no optimizer holds a watched parameter.
* OPTIMIZER: the steps of one optimizer are the run's; see Note [Whose steps] in
  `kedge.watch.models.optimizers`.

A run goes down this list, and back only from EXPECTED to FORWARD: at the second pass if no
optimizer is new or holds a parameter of the model, and after 256 passes with gradients. Searching
all objects for optimizers takes as long as hundreds of small steps, so it waits until it is needed.
A policy may be rolled out thousands of times before its first update.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from torch.optim import Optimizer

from kedge.hooks.firing.schedule import AWAITED, ForwardPasses, PassCounter, StepClock, rank
from kedge.torch_internals.checkpoint import Segments
from kedge.watch.models.optimizers import Optimizers, any_optimizer
from kedge.watch.models.roots import RootModule
from kedge.watch.steps.budget import Budget


class StepSource(IntEnum):
    """The event that ends a step; see Note [What makes the steps]."""

    NOTHING = 0
    FORWARD = 1
    EXPECTED = 2
    BACKWARD = 3
    OPTIMIZER = 4


class StepsHandler(Protocol):
    """What `Steps` reports to."""

    def pass_began(self, passes: PassCounter, graded: bool) -> None:
        """Called when a forward pass of a root begins.

        With its pass counter, and whether it has gradients.
        """

    def step_of_run_ended(self) -> None:
        """Called when a step has ended that others of its kind follow."""


class Steps(StepClock):
    """The step clock of a watched program.

    Args:
        optimizers: The program's optimizers.
        budget: Decides how many steps of one kind follow each other; only the last one of them is
            reported.
        handler: Receives the reports.

    Attributes:
        by: The events that end the steps.
        backward_passes: How many there were while no optimizer had stepped.
    """

    by_models = False

    def __init__(self, optimizers: Optimizers, budget: Budget, handler: StepsHandler) -> None:
        super().__init__(rank())
        self.optimizers = optimizers
        self.budget = budget
        self.handler = handler
        self.by = StepSource.NOTHING
        self.backward_passes = 0
        self._any_optimizer = False
        self._of_code: PassCounter | None = None

    @property
    def begun(self) -> int:
        """How many steps have begun; where forward passes may be the steps, every pass counts."""
        if self.by >= StepSource.BACKWARD:
            return self.step
        return self.led

    def add(self, root: RootModule, roots: Sequence[RootModule]) -> None:
        """Make the forward passes of a new root the steps.

        This is so if it alone has parameters and nothing else ends steps.
        """
        passes = root.hooks.passes
        if self.by >= StepSource.BACKWARD or passes is None or not root.parameters:
            return
        if any(r.parameters and r.hooks.hooked for r in roots if r is not root):
            return

        goes_on = self.by is not StepSource.NOTHING and self.led
        self.lead(passes, lambda: self.optimizers.expect(root.module()))
        self.led = 0
        if goes_on:
            self.led = self.step + 1
        self._any_optimizer = any_optimizer()
        self.by = StepSource.FORWARD
        if self._any_optimizer:
            self.by = StepSource.EXPECTED
        self.looked = not self._any_optimizer
        self.awaited = AWAITED

    def look(self) -> None:
        """Search, once, for an optimizer whose steps are worth waiting for."""
        super().look()
        self.by = StepSource.EXPECTED if self.awaited else StepSource.FORWARD

    def follow_code(self) -> PassCounter:
        """Return the pass counter of code that belongs to no root, whose passes are none of a root's."""
        self._of_code = PassCounter(self, ForwardPasses(), Segments())
        return self._of_code

    def began(self, passes: PassCounter, *, graded: bool) -> None:
        """Count a forward pass of any root."""
        if passes is not self._of_code:
            self.handler.pass_began(passes, graded)

    def count_pass(self, passes: PassCounter, graded: bool) -> None:
        """Count a forward pass of a root, which may begin a step."""
        if passes is self.leader:
            if self.by is StepSource.EXPECTED:
                self._wait(graded)
            if self.by is StepSource.FORWARD and self.led:
                # Each is reported: the hooks are installed, and their values belong to one step.
                super().end_step()
            self.led += 1
        if self.by is StepSource.FORWARD and not self._any_optimizer and any_optimizer():
            # It was made after the first pass.
            self._any_optimizer = True
            self.look()

    def _wait(self, graded: bool) -> None:
        if self.led and not self.looked:
            self.look()
        elif self.awaited <= 0:
            self.by = StepSource.FORWARD
        self.awaited -= graded

    def count_backward(self) -> list[Optimizer]:
        """Count a backward pass before any optimizer has stepped; it may be a step.

        Returns:
            The optimizers that hold watched parameters, at the one pass that searches for them;
            else none.
        """
        self.backward_passes += 1
        waiting: list[Optimizer] = []
        if self.by is not StepSource.BACKWARD and self.backward_passes <= 2:
            # An optimizer may be made late.
            decisive = 2 if any_optimizer() else 1
            if self.backward_passes == decisive:
                waiting = self.optimizers.waiting()
                if not waiting:
                    self.by = StepSource.BACKWARD
        if self.by is StepSource.BACKWARD:
            self.end_step()
        return waiting

    def count_update(self, optimizer: Optimizer) -> None:
        """Count an update of an optimizer, which may end a step of the run."""
        if self.optimizers.stepped(optimizer):
            self.by = StepSource.OPTIMIZER
            self.optimized()

    def count_skipped(self, optimizer: Optimizer) -> bool:
        """Count an update of an optimizer in a skipped step that another one follows.

        Returns whether it is one. See Note [Cold caches] in `kedge.watch.step`.
        """
        leading, budget = self.optimizers.leading, self.budget
        if (
            budget.run <= 1
            or leading is None
            or leading.optimizer() is not optimizer
            or self.backwards.ending != -1
        ):
            return False
        leading.steps += 1
        self.optimizers.idle = 0
        budget.run -= 1
        self.step += 1
        return True

    def end_step(self) -> None:
        """Count one step; of several steps of one kind only the last one is reported."""
        if self.budget.run > 1:
            self.budget.run -= 1
            self.step += 1
            self.handler.step_of_run_ended()
        else:
            super().end_step()
