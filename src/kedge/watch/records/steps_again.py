"""The examinations of a run's bad steps, each in a copy of the process; see `kedge.repro.step`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kedge.repro.step.step_again import StepAgain, can_examine
from kedge.store.events import ProducerEvent
from kedge.torch_internals.module_tables import modules_in
from kedge.watch.models.backward_start import BackwardStart
from kedge.watch.models.models import Models

_MOST = 2
"""Most steps of a run that are examined: a program may go on with such losses for long."""
_PATIENCE = 20.0
"""Seconds that an examination is waited for, at the end of the run or where its result decides."""


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
        self._random_state: Tensor | None = None

    def begin_after_step(self) -> None:
        """Keep the state of PyTorch's random numbers: here the next step begins; it takes a microsecond."""
        self._random_state = torch.default_generator.get_state()

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
        again = StepAgain(at.frame, at.tensors, step, site, self._paths, self._random_state)
        self._begun.append(again)

    def arrived(self, *, wait: bool = False) -> list[ProducerEvent]:
        """Return what the examinations have found that are over by now, or when they are."""
        seconds = 0.0
        if wait:
            seconds = _PATIENCE
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
        found = self.arrived(wait=True)
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
