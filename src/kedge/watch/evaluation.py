"""Which forward passes are measured: evaluation between the steps of a training is not.

# Note [Passes without gradients]
Once a program trains, passes without gradients are evaluation, and are not measured. Before its first step it is not known
whether it will: an optimizer may have been made for a checkpoint alone. So as long as one is waited for, the first such
pass of each root is measured; it is dropped as soon as a model with parameters is called for gradients. Nor does such a
pass use up the patience with which an optimizer's first step is waited for: a policy may be rolled out thousands of times.
"""

from __future__ import annotations

from collections.abc import Sequence

from kedge.hooks.schedule import Clock, Passes
from kedge.watch.optimizers import Optimizers
from kedge.watch.roots import Meter, Root

NEVER = 1 << 40
"""For how many passes to wait where passes are no steps."""
_MOST = 256
"""How many passes of a step are measured at most."""


class Evaluation:
    """Mutes the meter in passes that are not measured; see Note [Passes without gradients].

    Args:
        clock: Counts the steps.
        meter: What measures.
        optimizers: Know whether an optimizer was made.
        roots: The models.
    """

    def __init__(self, clock: Clock, meter: Meter, optimizers: Optimizers, roots: Sequence[Root]) -> None:
        self.clock, self.meter, self.optimizers, self.roots = clock, meter, optimizers, roots
        self._measured, self._differentiates = 0, False
        self._ungraded: set[int] = set()

    def begin_step(self) -> None:
        """Begin a step."""
        self._measured = 0

    def began(self, passes: Passes) -> None:
        """Decide whether the pass of a root that has begun is measured."""
        clock, graded = self.clock, passes.here.graded
        if clock.optimizer is None and clock.awaited <= 0:
            self.optimizers.look_again()
        left = clock.awaited + (clock.leader is passes)  # before this pass was counted
        waits = left > 0 and clock.optimizer is None
        if waits and not graded:
            clock.awaited = left
        if waits and not self._differentiates:
            muted = not self._is_measured_before(passes)
        else:
            muted = not graded and (waits or clock.optimizer is not None)
        self._measured += not muted
        self.meter.muted = muted or self._measured > _MOST

    def _is_measured_before(self, passes: Passes) -> bool:
        """Whether a pass before the first step is measured: one with gradients, or a root's first one."""
        if not passes.here.graded:
            first = id(passes) not in self._ungraded
            self._ungraded.add(id(passes))
            return first
        if any(root.parameters and root.passes is passes for root in self.roots):
            self._differentiates = True
            if self._ungraded:
                self.meter.drop()
        return True
