"""Inputs that come several times in a row, as from workers of a data loader that all have the same samples."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from kedge.store.events import LoaderWorkers, RepeatedBatchesEvent
from kedge.watch.models.roots import RootModule
from kedge.watch.records.facts.inputs import living_loaders
from kedge.watch.records.samples import can_sample, compared, sample, tensors_in

_STEPS = 64
"""In how many steps inputs are compared with those before."""
_LEAST = 3
"""Least groups of equal inputs, without the first and the last one, which may not be whole."""


class RepeatedBatches:
    """Compares the inputs of one root in each of the first steps with those of the step before.

    Workers take turns in giving batches: if all have the same samples, each batch comes as often as
    there are workers. Inputs are compared only in a program that has several. On a device the
    results stay there until the end of the run, since reading them would wait.
    """

    def __init__(self, root: RootModule) -> None:
        self._root = root
        self._before: list[Tensor] = []
        self._equal: list[list[Tensor] | None] = []
        self._first = self._last = -1
        self._workers: tuple[LoaderWorkers, ...] = ()
        self._is_over = False

    def wants(self, step: int) -> bool:
        """Whether the inputs of a pass in a step are looked at."""
        return not self._is_over and step != self._last

    def take(self, given: Any, step: int) -> None:
        """Compare the inputs of a pass with those of the step before."""
        if self._last < 0:
            self._look_for_workers()
            if self._is_over:
                return
        found = [value for _, value in tensors_in(given)]
        is_next = self._last in (-1, step - 1)
        if not found or not is_next or not all(map(can_sample, found)):
            self._is_over = True
            return
        if self._last < 0:
            self._first = step
        self._last = step
        samples = [sample(value).clone() for value in found]
        if self._before:
            self._equal.append(compared(samples, self._before))
        self._before = samples
        if len(self._equal) == _STEPS:
            self._is_over = True
            self._before = []

    def notes(self) -> list[RepeatedBatchesEvent]:
        """Return the notes at the end of the run."""
        if not self._workers:
            return []
        equal = (each is not None and all(map(bool, each)) for each in self._equal)
        lengths = list(_lengths(equal))[1:-1]
        if len(lengths) < _LEAST or len(set(lengths)) > 1 or lengths[0] == 1:
            return []
        note = RepeatedBatchesEvent(
            step=self._first,
            root=self._root.index,
            times=lengths[0],
            batches=len(lengths),
            loaders=self._workers,
        )
        return [note]

    def _look_for_workers(self) -> None:
        """Look for data loaders with several workers; without child processes there are none."""
        children = len(multiprocessing.active_children())
        if children > 1:
            found = [
                LoaderWorkers(each.num_workers, _is_stream(each))
                for each in living_loaders()
                if each.num_workers > 1
            ]
            # An iterator does not hold its loader.
            self._workers = tuple(found) or (LoaderWorkers(children),)
        self._is_over = not self._workers


def _is_stream(loader: Any) -> bool:
    """Whether the data set of a loader has no index; isinstance would run code of odd objects."""
    stream = sys.modules["torch.utils.data"].IterableDataset
    return issubclass(type(loader.dataset), stream)


def _lengths(equal: Iterator[bool]) -> Iterator[int]:
    """Yield the lengths of groups of inputs that are equal to those before."""
    length = 1
    for is_equal in equal:
        if is_equal:
            length += 1
        else:
            yield length
            length = 1
    yield length
