"""The norm of gradients as backward passes left it, and when an optimizer used it."""

from __future__ import annotations

import math
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.actions.measure.table import Departures
from kedge.store.events import GradientsUsedEvent

_MOST = 64
"""Most steps of an optimizer that are compared."""


class ComparedNorms(NamedTuple):
    """The sums of squares of the gradients that an optimizer uses.

    Attributes:
        arrived: As the backward passes left them.
        used: When it steps: the program may have clipped them, or divided them by a scale.
    """

    arrived: Tensor | float
    used: Tensor | float


class UsedGradients:
    """Collects both norms in measured steps; on a device they are read at the end of the run."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[ComparedNorms, Tensor | None]]] = {}

    def add(self, optimizer: int, norms: ComparedNorms, scale: Tensor | None) -> None:
        """Add the norms of one step; a scale is what a GradScaler has multiplied the loss by."""
        known = self._known.setdefault(optimizer, [])
        if len(known) < _MOST:
            known.append((norms, scale))

    def notes(self) -> list[GradientsUsedEvent]:
        """Return an event for each optimizer, waiting for devices once."""
        numbers: list[Tensor | float | None] = []
        for known in self._known.values():
            for norms, scale in known:
                numbers += [*norms, scale]
        read = iter(_read(numbers))
        found = []
        for optimizer, known in self._known.items():
            event = _event_of(optimizer, [(next(read), next(read), next(read)) for _ in known])
            if event is not None:
                found.append(event)
        return found


def _read(numbers: list[Tensor | float | None]) -> list[float | None]:
    """Return numbers, those on a device in one copy of each."""
    departures = Departures()
    by_device: dict[torch.device, list[int]] = {}
    for at, number in enumerate(numbers):
        if isinstance(number, Tensor):
            by_device.setdefault(number.device, []).append(at)
    read: list[float | None] = [None if isinstance(each, Tensor) else each for each in numbers]
    copies = []
    for places in by_device.values():
        there = [each for at in places if isinstance(each := numbers[at], Tensor)]
        together = torch.stack([each.detach().float().reshape(()) for each in there])
        copies.append((places, departures.add(together)))
    departures.send()
    for places, copy in copies:
        for at, number in zip(places, copy.numpy().tolist(), strict=True):
            read[at] = number
    return read


def _event_of(
    optimizer: int, known: list[tuple[float | None, float | None, float | None]]
) -> GradientsUsedEvent | None:
    arrived: list[float] = []
    used: list[float] = []
    scaled: list[float] = []
    last: float | None = None
    for squares, squares_used, given in known:
        scale = given or 1.0
        before = math.sqrt(squares or 0.0) / scale
        after = math.sqrt(squares_used or 0.0)
        if not (math.isfinite(before) and math.isfinite(after) and before > 0):
            continue
        arrived.append(before)
        used.append(after)
        scaled.append(after * scale)
        last = given
    if not arrived:
        return None
    return GradientsUsedEvent(
        optimizer=optimizer,
        steps=len(arrived),
        arrived=median(arrived),
        used=median(used),
        share=median(after / before for before, after in zip(arrived, used, strict=True)),
        scale=last,
        least=min(scaled),
        most=max(scaled),
    )
