"""Which forward passes are measured: evaluation between the steps of a training is not.

# Note [Passes without gradients]
Once a program trains, passes without gradients are evaluation, and are not measured. Before its first step it is not known
whether it will: an optimizer may have been made for a checkpoint alone. So as long as one is waited for, the first such
pass of each root is measured; it is dropped as soon as a model with parameters is called for gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from kedge.hooks.firing.schedule import PassCounter
from kedge.watch.models.roots import RootModule, WatchMeter
from kedge.watch.steps.steps import StepSource

_MOST = 256
"""How many passes of a step are measured at most."""


class Evaluation:
    """Mutes the meter in passes that are not measured; see Note [Passes without gradients]."""

    def __init__(self, meter: WatchMeter, roots: Sequence[RootModule]) -> None:
        self.meter, self.roots = meter, roots
        self._measured, self._trains = 0, False
        self._ungraded: set[int] = set()

    def begin_step(self) -> None:
        """Begin a step."""
        self._measured = 0

    def began(self, passes: PassCounter, steps_by: StepSource, *, graded: bool) -> None:
        """Decide whether the pass of a root that has begun is measured, where something makes the steps."""
        measured = graded or steps_by is StepSource.FORWARD
        if steps_by not in (StepSource.FORWARD, StepSource.OPTIMIZER) and not self._trains:
            if not graded:
                measured = id(passes) not in self._ungraded
                self._ungraded.add(id(passes))
            elif any(root.parameters and root.passes is passes for root in self.roots):
                self._trains = True
                if self._ungraded:
                    self.meter.drop()
        self._measured += measured
        self.meter.muted = not measured or self._measured > _MOST
