"""Decides which forward passes are measured: evaluation between the steps of a training is not.

# Note [Passes without gradients]
Once a program trains, passes without gradients are evaluation, and are not measured. Before its
first step it is unknown whether it will train: an optimizer may exist only for loading a
checkpoint. So while a first step is awaited, the first such pass of each root is measured; these
measurements are dropped as soon as a model with parameters is called for gradients.

# Note [Rehearsals]
PyTorch's pipelines learn the shapes of values before the first micro-batch: each stage is called,
and its backward run, on memory that holds nothing. Such values belong to no step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice

from kedge.actions.measure.meter import Meter
from kedge.frames import frames_around
from kedge.hooks.firing.schedule import PassCounter
from kedge.watch.models.roots import RootModule
from kedge.watch.step import Step
from kedge.watch.steps.steps import StepSource

_MOST = 256
"""Most measured passes of a step."""
_PIPELINES = "torch.distributed.pipelining.stage"
_REHEARSAL = "_forward_metadata_inference"
_DEPTH = 24
"""Most frames between a stage's call and that of its module."""


class Evaluation:
    """Mutes the meter in passes that are not measured; see Note [Passes without gradients]."""

    def __init__(self, meter: Meter, roots: Sequence[RootModule]) -> None:
        self.meter = meter
        self.roots = roots
        self._measured = 0
        self._trains = False
        self._ungraded: set[int] = set()

    def begin_step(self, step: Step) -> None:
        """Begin a step."""
        self._measured = 0

    def began(self, passes: PassCounter, steps_by: StepSource, *, graded: bool) -> None:
        """Decide whether a root's forward pass that has begun is measured.

        Called with the source of the steps.
        """
        measured = graded or steps_by is StepSource.FORWARD
        is_known = steps_by in (StepSource.FORWARD, StepSource.OPTIMIZER)
        if not is_known and not self._trains:
            if not graded:
                measured = id(passes) not in self._ungraded
                self._ungraded.add(id(passes))
            elif any(r.parameters and r.hooks.passes is passes for r in self.roots):
                self._trains = True
                if self._ungraded:
                    self.meter.drop()
        self._measured += measured
        self.meter.muted = not measured or self._measured > _MOST


class Rehearsals:
    """Recognizes the end of calls on memory that holds nothing; see Note [Rehearsals]."""

    def __init__(self) -> None:
        self._is_rehearsing = False

    def ended(self) -> bool:
        """Called when a forward pass begins: whether it is the first one after a rehearsal."""
        before = self._is_rehearsing
        self._is_rehearsing = _PIPELINES in sys.modules and _is_in_rehearsal()
        return before and not self._is_rehearsing


def _is_in_rehearsal() -> bool:
    for frame in islice(frames_around(sys._getframe(2)), _DEPTH):
        is_called_so = frame.f_code.co_name == _REHEARSAL
        if is_called_so and frame.f_globals.get("__name__") == _PIPELINES:
            return True
    return False
