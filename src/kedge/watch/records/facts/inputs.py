"""The inputs of a model over the steps: whether they are the same in each, and fit each other."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from kedge.store.events import BatchSizesEvent, DataLoaderSeen, RepeatedInputsEvent
from kedge.watch.models.roots import RootModule
from kedge.watch.records.facts.batch_sizes import InputSizes
from kedge.watch.records.samples import can_sample, compared, sample, tensors_in

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
        self._sizes = InputSizes(root)
        self._first: list[Tensor] = []
        self._since = self._last = -1
        self._batch = 0
        self._looks = self._compared = 0
        self._vary = False
        self._on_devices: list[Tensor] = []
        self._loaders: tuple[DataLoaderSeen, ...] = ()

    def wants(self, step: int, *, measured: bool) -> bool:
        """Whether the inputs of a pass in a step are looked at."""
        is_known = self._vary and not self._sizes.waits
        is_over = is_known or self._looks == _MOST
        return measured and not is_over and step != self._last

    def take(self, args: Any, kwargs: Any, step: int) -> None:
        """Compare the inputs of a pass with those of the first step."""
        self._last = step
        self._looks += 1
        named = tensors_in({**dict(enumerate(args)), **(kwargs or {})})
        found = [value for _, value in named]
        if not found or not all(map(can_sample, found)):
            self._vary = True  # as far as can be known
            return
        self._sizes.compare(named, step)
        samples = [sample(value) for value in found]
        if not self._first:
            self._first = [value.clone() for value in samples]
            self._batch = max((value.shape[0] for value in found if value.dim()), default=0)
            self._since = step
            return
        if self._vary:
            return

        self._compared += 1
        self._compare(samples)
        if self._compared == _SUSPICIOUS and not self._vary and not self._on_devices:
            self._loaders = tuple(_data_loaders())

    def notes(self) -> list[RepeatedInputsEvent | BatchSizesEvent]:
        """Return the notes at the end of the run."""
        sizes = self._sizes.notes()
        if self._vary or not self._compared or not all(map(bool, self._on_devices)):
            return [*sizes]
        note = RepeatedInputsEvent(
            step=self._since,
            root=self._root.index,
            compared=self._compared,
            batch=self._batch,
            loaders=self._loaders or tuple(_data_loaders()),
        )
        return [note, *sizes]

    def _compare(self, samples: list[Tensor]) -> None:
        """Compare inputs with the first ones."""
        answers = compared(samples, self._first)
        self._vary = answers is None
        self._on_devices += answers or []


def _data_loaders() -> Iterator[DataLoaderSeen]:
    """Yield the program's data loaders, as far as they tell how many batches they have."""
    for each in living_loaders():
        try:
            batches = len(each)
        except (TypeError, NotImplementedError):
            continue  # a stream has no length
        yield DataLoaderSeen(batch_size=each.batch_size, batches=batches)


def living_loaders() -> Iterator[Any]:
    """Yield every existing data loader. Slow: it searches all objects."""
    module = sys.modules.get("torch.utils.data")
    if module is None:
        return
    kinds = [module.DataLoader]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for each in gc.get_referrers(*kinds):
        if issubclass(type(each), module.DataLoader):  # isinstance runs code of odd objects
            yield each
