"""The learning rates of each optimizer, over the measured steps."""

from __future__ import annotations

from torch.optim import Optimizer

from kedge.store.events import LearningRatesEvent
from kedge.watch.models.optimizers import group_names, rates_now


class LearningRates:
    """Notes the learning rates with which an optimizer is about to step, whenever they have changed."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[float | None, ...]] = {}

    def before_step(self, step: int, optimizer: Optimizer, index: int) -> list[LearningRatesEvent]:
        """Return a note if the rates of an optimizer, which has this number, are not those of its last note."""
        rates = rates_now(optimizer)
        if self._noted.get(index) == rates:
            return []
        self._noted[index] = rates
        names = group_names(optimizer)
        return [LearningRatesEvent(step=step, optimizer=index, rates=rates, names=names)]
