"""Inputs of a model whose first sizes differ: one sample for a whole batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kedge.store.events import BatchSizesEvent
from kedge.watch.models.roots import RootModule
from kedge.watch.records.samples import sample

Named = list[tuple[str, Tensor]]


class Odd(NamedTuple):
    """An input of one sample beside others of a batch."""

    name: str
    value: Tensor
    batch: int
    others: tuple[str, ...]


class InputSizes:
    """Compares the first sizes of the inputs of one root.

    A mask or positions that serve every sample have a first size of one as well. They stay the same
    from step to step, so only an input that changes is noted.
    """

    def __init__(self, root: RootModule) -> None:
        self._root = root
        self._odd: Odd | None = None
        self._step = -1
        self._changed: bool | Tensor = False

    @property
    def waits(self) -> bool:
        """Whether there is such an input, which has not changed so far."""
        return self._odd is not None and self._changed is False

    def compare(self, found: Named, step: int) -> None:
        """Look at the inputs of a pass; those of the first one and of a later one are compared."""
        odd = one_beside_many(found)
        first = self._odd
        if odd is None or self._changed is not False:
            return
        if first is None:
            self._odd = odd._replace(value=sample(odd.value).clone())
            self._step = step
            return
        now = sample(odd.value)
        if odd.name != first.name or now.shape != first.value.shape:
            return
        if now.is_cpu:
            self._changed = not torch.equal(now, first.value)
        else:
            self._changed = (now != first.value).any()

    def notes(self) -> list[BatchSizesEvent]:
        """Return the note at the end of the run."""
        odd = self._odd
        if odd is None or not bool(self._changed):
            return []
        note = BatchSizesEvent(
            step=self._step,
            root=self._root.index,
            input=odd.name,
            batch=odd.batch,
            others=odd.others,
        )
        return [note]


def one_beside_many(found: Named) -> Odd | None:
    """Return the one input whose first size is one, while all others have one and the same larger one."""
    sized = [(name, value) for name, value in found if value.dim()]
    many = {value.shape[0] for _, value in sized if value.shape[0] > 1}
    ones = [(name, value) for name, value in sized if value.shape[0] == 1]
    if len(many) != 1 or len(ones) != 1:
        return None
    batch = many.pop()
    name, value = ones[0]
    # A single number serves all, and the state of a recurrent layer has its batch in another place.
    if value.dim() < 2 or batch in value.shape:
        return None
    return Odd(name, value, batch, tuple(name for name, other in sized if other is not value))
