"""Which forward passes are measured: evaluation between the steps of a training is not.

# Note [Passes without gradients]
Once a program trains, passes without gradients are evaluation, and are not measured. Before its first step it is not known
whether it will: an optimizer may have been made for a checkpoint alone. So as long as one is waited for, the first such
pass of each root is measured; it is dropped as soon as a model with parameters is called for gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from kedge.hooks.schedule import Passes
from kedge.watch.roots import Meter, Root
from kedge.watch.steps import Source

_MOST = 256
"""How many passes of a step are measured at most."""


class Evaluation:
    """Mutes the meter in passes that are not measured; see Note [Passes without gradients].

    Args:
        meter: What measures.
        roots: The models.
    """

    def __init__(self, meter: Meter, roots: Sequence[Root]) -> None:
        self.meter, self.roots = meter, roots
        self._measured, self._trains = 0, False
        self._ungraded: set[int] = set()

    def begin_step(self) -> None:
        """Begin a step."""
        self._measured = 0

    def began(self, passes: Passes, graded: bool, steps_by: Source) -> None:
        """Decide whether the pass of a root that has begun is measured, where something makes the steps."""
        if steps_by is Source.FORWARD:
            measured = True
        else:
            before_training = steps_by is not Source.OPTIMIZER and not self._trains
            if before_training and graded and any(r.parameters and r.passes is passes for r in self.roots):
                self._begin_training()
            measured = graded or (before_training and id(passes) not in self._ungraded)
            if before_training and not graded:
                self._ungraded.add(id(passes))
        self._measured += measured
        self.meter.muted = not measured or self._measured > _MOST

    def _begin_training(self) -> None:
        self._trains = True
        if self._ungraded:
            self.meter.drop()
