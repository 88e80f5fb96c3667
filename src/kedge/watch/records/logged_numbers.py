"""The numbers that the program logs, collected like losses: those on a device are read later."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kedge.actions.measure.table import Departures
from kedge.sites.leaves import own_part
from kedge.store.events import LoggedEvent
from kedge.torch_internals import modes
from kedge.watch.records.curves import Curves


class LoggedNumbers:
    """Collects what the program logs, to be written together.

    Args:
        departures: Takes numbers on devices to the host.
    """

    def __init__(self, departures: Departures) -> None:
        self._curves = Curves(departures)
        self._names: dict[str, int] = {}

    def add(self, step: int, name: str, value: Tensor | float) -> None:
        """Add a number; one on a device stays there."""
        number = value
        if isinstance(value, Tensor):
            own = own_part(value.detach())
            if not modes.has_data(own):
                return
            if own.is_cpu:
                number = float(own)
            else:
                with torch.no_grad():
                    number = own.reshape(()).float().clone()
        site = self._names.setdefault(name, len(self._names))
        self._curves.add_value(step, site, number, measured=False)

    def is_due(self) -> bool:
        """Whether the collected numbers should be written now."""
        return self._curves.is_due()

    def take(self, step: int, *, wait: bool = False) -> Iterator[LoggedEvent]:
        """Yield events with the numbers of the steps up to one, and forget these.

        Args:
            step: The step.
            wait: Whether to wait for numbers that are still on their way from a device.
        """
        columns: dict[str, Any] | None = self._curves.take(step, wait=wait)
        self._curves.news.clear()
        if columns is None:
            return
        for name, number in self._names.items():
            own = columns["site"] == number
            if own.any():
                values = columns["sum"][own].tolist()
                yield LoggedEvent(
                    name=name,
                    steps=tuple(columns["step"][own].tolist()),
                    values=tuple(each if math.isfinite(each) else str(each) for each in values),
                )
