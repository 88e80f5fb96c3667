"""The norm of gradients as backward passes left it, and when an optimizer used it."""

from __future__ import annotations

import math
from statistics import median
from typing import NamedTuple

from torch import Tensor

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
        """Return an event for each optimizer, waiting for devices."""
        found = (_event_of(optimizer, known) for optimizer, known in self._known.items())
        return [event for event in found if event is not None]


def _event_of(
    optimizer: int, known: list[tuple[ComparedNorms, Tensor | None]]
) -> GradientsUsedEvent | None:
    arrived: list[float] = []
    used: list[float] = []
    scaled: list[float] = []
    last: float | None = None
    for norms, given in known:
        scale = 1.0
        if given is not None:
            scale = float(given)
        before = math.sqrt(max(float(norms.arrived), 0.0)) / scale
        after = math.sqrt(max(float(norms.used), 0.0))
        if not (math.isfinite(before) and math.isfinite(after) and before > 0):
            continue
        arrived.append(before)
        used.append(after)
        scaled.append(after * scale)
        last = None if given is None else scale
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
