"""The inputs of a model over the steps: whether they are the same in each."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kedge.sites import leaves
from kedge.store.events import DataLoaderSeen, RepeatedInputsEvent
from kedge.torch_internals import modes
from kedge.watch.models.roots import RootModule
from kedge.watch.records.optimizer_updates import sample

_MOST = 30
"""Most steps in which inputs are compared: more would say nothing new."""
_SUSPICIOUS = 8
"""Equal steps after which the data loaders of the program are looked for; on a device, at the end."""


class Inputs:
    """Compares the inputs of one root in the first pass of each of some measured steps.

    Of large inputs 1,024 elements are compared. On a device the result stays there until the end of
    the run, since reading it would wait.
    """

    def __init__(self, root: RootModule) -> None:
        self._root = root
        self._first: list[Tensor] = []
        self._since = self._last = -1
        self._equal: list[Tensor] = []
        self._compared = 0
        self._is_over = False
        self._loaders: tuple[DataLoaderSeen, ...] = ()
        self._batch = 0

    def wants(self, step: int, *, measured: bool) -> bool:
        """Whether the inputs of a pass in a step are looked at."""
        return measured and not self._is_over and step != self._last

    def take(self, given: Any, step: int) -> None:
        """Compare the inputs of a pass with those of the first step."""
        self._last = step
        found = [value for _, value in leaves.find(given) if _can_compare(value)]
        if not found:
            self._is_over = True
            return
        samples = [sample(value) for value in found]
        if not self._first:
            self._first = [value.clone() for value in samples]
            self._batch = max((value.shape[0] for value in found if value.dim()), default=0)
            self._since = step
            return

        self._compared += 1
        self._is_over = self._compared == _MOST or not self._compare(samples)
        if self._compared == _SUSPICIOUS and not self._equal:
            self._loaders = tuple(_data_loaders())

    def _compare(self, samples: list[Tensor]) -> bool:
        """Compare inputs with the first ones; returns whether they may be equal."""
        shapes = [(value.shape, value.device, value.dtype) for value in self._first]
        if shapes != [(value.shape, value.device, value.dtype) for value in samples]:
            self._equal = [torch.tensor(False)]
            return False
        for value, first in zip(samples, self._first, strict=True):
            if value.is_cpu:
                if not torch.equal(value, first):
                    self._equal = [torch.tensor(False)]
                    return False
            else:
                self._equal.append((value == first).all())
        return True

    def notes(self) -> list[RepeatedInputsEvent]:
        """Return the notes at the end of the run."""
        notes: list[RepeatedInputsEvent] = []
        if self._compared and all(bool(equal) for equal in self._equal):
            note = RepeatedInputsEvent(
                step=self._since,
                root=self._root.index,
                compared=self._compared,
                batch=self._batch,
                loaders=self._loaders or tuple(_data_loaders()),
            )
            notes.append(note)
        return notes


def _can_compare(value: Tensor) -> bool:
    is_plain = value.layout is torch.strided and not value.is_quantized
    return is_plain and value.numel() > 0 and modes.has_data(value)


def _data_loaders() -> Iterable[DataLoaderSeen]:
    """Yield the program's data loaders, as far as they tell how many batches they have."""
    module = sys.modules.get("torch.utils.data")
    if module is None:
        return
    kinds = [module.DataLoader]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for each in gc.get_referrers(*kinds):
        if not issubclass(type(each), module.DataLoader):  # isinstance runs code of odd objects
            continue
        try:
            batches = len(each)
        except (TypeError, NotImplementedError):
            continue  # a stream has no length
        yield DataLoaderSeen(batch_size=each.batch_size, batches=batches)
