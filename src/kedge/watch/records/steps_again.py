"""The examinations of a run's bad steps, each in a copy of the process; see `kedge.repro.step`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from time import monotonic

from torch import nn

from kedge.frames import frames_around
from kedge.repro.step.step_again import StepAgain, can_examine
from kedge.store.events import ProducerEvent
from kedge.torch_internals.module_tables import modules_in
from kedge.watch.models.backward_start import BackwardStart
from kedge.watch.models.models import Models

_MOST = 2
"""Most steps of a run that are examined: a program may go on with such losses for long."""
_PATIENCE = 5.0
"""Seconds that the end of a run waits for examinations in any case; half of what the end may take."""
_PAUSE = 0.1
"""Seconds for which the end waits for one of them at a time."""
_SHARE_OF_RUN = 0.5
"""The part of the time of a run that its end waits for them, if that is more."""


class StepsAgain:
    """Begins examinations of steps whose loss or gradients are not finite, and collects what they find.

    Args:
        models: The watched models.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._begun: list[StepAgain] = []
        self._left = _MOST
        self._last = -1
        self._since = monotonic()

    def begin(self, at: BackwardStart, step: int, site: str) -> None:
        """Begin to examine the current step, if it can be.

        Args:
            at: The backward pass; its frame and those around it are still there.
            step: The step.
            site: The path of the loss.
        """
        if self._left <= 0 or at.frame is None or not at.tensors:
            return
        if step == self._last:
            return
        if not can_examine(at.tensors, list(self._paths())):
            return
        self._left -= 1
        self._last = step
        frame = at.frame
        here = sys._getframe(1)
        # Those below the user's: a trainer has the lines that computed the loss.
        if any(each is frame for each in frames_around(here)):
            frame = here
        self._begun.append(StepAgain(frame, at.tensors, step, site, self._paths))

    def arrived(self, seconds: float = 0.0) -> list[ProducerEvent]:
        """Return what the examinations have found that are over by now.

        Args:
            seconds: How long to wait for each.
        """
        found = []
        for each in list(self._begun):
            event = each.found(seconds)
            if event is not None:
                found.append(event)
            if event is not None or each.is_over():
                self._begun.remove(each)
        return found

    def end(self) -> list[ProducerEvent]:
        """Wait for the examinations; returns what they found."""
        found = []
        now = monotonic()
        until = now + max(_PATIENCE, _SHARE_OF_RUN * (now - self._since))
        while self._begun and monotonic() < until:
            found += self.arrived(min(_PAUSE, until - monotonic()))
        for each in self._begun:
            each.close()
        self._begun.clear()
        return found

    def _paths(self) -> Mapping[nn.Module, str]:
        """Return the recorded path of each module."""
        found: dict[nn.Module, str] = {}
        for root in self._models.roots:
            module = root.module()
            if module is not None:
                for path, inner in modules_in(module).items():
                    found.setdefault(inner, root.label(path))
        return found
