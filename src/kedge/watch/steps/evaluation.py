"""Decides which forward passes are measured: evaluation between the steps of a training is not.

# Note [Passes without gradients]
Once a program trains, passes without gradients are evaluation, and are not measured. Before its
first step it is unknown whether it will train: an optimizer may exist only for loading a
checkpoint. So while a first step is awaited, the first such pass of each root is measured; these
measurements are dropped as soon as a model with parameters is called for gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from kedge.actions.measure.meter import Meter
from kedge.hooks.firing.schedule import PassCounter
from kedge.watch.models.roots import RootModule
from kedge.watch.step import Step
from kedge.watch.steps.steps import StepSource

_MOST = 256
"""Most measured passes of a step."""


class Evaluation:
    """Mutes the meter in passes that are not measured; see Note [Passes without gradients]."""

    def __init__(self, meter: Meter, roots: Sequence[RootModule]) -> None:
        self.meter, self.roots = meter, roots
        self._measured, self._trains = 0, False
        self._ungraded: set[int] = set()

    def begin_step(self, step: Step) -> None:
        """Begin a step."""
        self._measured = 0

    def began(self, passes: PassCounter, steps_by: StepSource, *, graded: bool) -> None:
        """Decide whether a root's forward pass that has begun is measured; called with the source of the steps."""
        measured = graded or steps_by is StepSource.FORWARD
        if steps_by not in (StepSource.FORWARD, StepSource.OPTIMIZER) and not self._trains:
            if not graded:
                measured = id(passes) not in self._ungraded
                self._ungraded.add(id(passes))
            elif any(root.parameters and root.hooks.passes is passes for root in self.roots):
                self._trains = True
                if self._ungraded:
                    self.meter.drop()
        self._measured += measured
        self.meter.muted = not measured or self._measured > _MOST
