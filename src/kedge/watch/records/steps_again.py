"""Steps of a run that run again, each in a copy of the process; see `kedge.repro.step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic

from torch import Tensor, nn

from kedge.repro.step.bad_operation import find_operation
from kedge.repro.step.rows import find_rows
from kedge.repro.step.step_again import StepAgain, can_run_again
from kedge.store.events import ProducerEvent, RowsEvent
from kedge.torch_internals.accelerators import cpu_generator_state
from kedge.torch_internals.module_tables import modules_in
from kedge.watch.models.backward_start import BackwardStart, frame_below
from kedge.watch.models.models import Models

_MOST = 2
"""Most steps of a run that run again for one reason: a program may go on with such losses for long."""
_PATIENCE = 5.0
"""Seconds that they are waited for in any case, at the end of a run or where their result decides."""
_PAUSE = 0.1
"""Seconds for which one of them is waited for at a time."""
_SHARE_OF_RUN = 0.5
"""The part of the time of a run that its end waits for them, if that is more."""

Event = ProducerEvent | RowsEvent


class StepsAgain:
    """Runs steps again: for the operation that made a value not finite, and for the rows that made a loss jump.

    Args:
        models: The watched models.

    Attributes:
        prepare: Called in a copy, before the lines of the step run again.
    """

    def __init__(self, models: Models) -> None:
        self.prepare: Callable[[], None] = _nothing
        self._models = models
        self._begun: list[StepAgain] = []
        self._left: dict[type[Event], int] = {ProducerEvent: _MOST, RowsEvent: _MOST}
        self._last = -1
        self._random_state: Tensor | None = None
        self._since = monotonic()

    def refuse(self) -> None:
        """Run no step again."""
        self._left = dict.fromkeys(self._left, 0)

    def begin_after_step(self) -> None:
        """Keep the state of PyTorch's random numbers: here the next step begins; it takes a microsecond."""
        self._random_state = cpu_generator_state()

    @property
    def random_state(self) -> Tensor | None:
        """The state of PyTorch's random numbers after the last step; None before."""
        return self._random_state

    def find_operation(self, at: BackwardStart, step: int, site: str) -> None:
        """Begin to look for the operation that made the current loss, or its gradients, not finite.

        Args:
            at: The backward pass; its frame and those around it are still there.
            step: The step.
            site: The path of the loss.
        """
        frame = frame_below(at.frame)
        if frame is not None:
            find = partial(find_operation, frame, at.tensors, self._paths)
            self._begin(find, ProducerEvent, at, step, site)

    def find_rows(self, at: BackwardStart, step: int, site: str) -> None:
        """Begin to look for the rows of the batch that made the current loss jump; arguments as above."""
        frame = frame_below(at.frame)
        if frame is not None:
            self._begin(partial(find_rows, frame, at.tensors), RowsEvent, at, step, site)

    def _begin(
        self,
        find: Callable[[], bytes],
        kind: type[Event],
        at: BackwardStart,
        step: int,
        site: str,
    ) -> None:
        if self._left[kind] <= 0 or step == self._last or not at.tensors:
            return
        if not can_run_again(at.tensors, list(self._paths())):
            return
        self._left[kind] -= 1
        self._last = step
        prepared = partial(_prepared, self.prepare, find)
        self._begun.append(StepAgain(prepared, kind, step, site, self._random_state))

    def arrived(self, *, wait: bool = False) -> list[Event]:
        """Return what has been found by now; or wait for all of it, as long as it may take."""
        now = until = monotonic()
        if wait:
            until = now + max(_PATIENCE, _SHARE_OF_RUN * (now - self._since))
        found = self._collected(0.0)
        while self._begun and monotonic() < until:
            found += self._collected(_PAUSE)
        return found

    def _collected(self, seconds: float) -> list[Event]:
        """Return what has been found, waiting some time for each; forget those that are over."""
        found = []
        for each in list(self._begun):
            event = each.found(seconds)
            if event is not None:
                found.append(event)
            if event is not None or each.is_over():
                self._begun.remove(each)
        return found

    def end(self) -> list[Event]:
        """Wait for all of it; returns what was found."""
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


def _prepared(prepare: Callable[[], None], find: Callable[[], bytes]) -> bytes:
    prepare()
    return find()


def _nothing() -> None:
    """Nothing has to be prepared."""
