"""Single numbers of every watched step: the loss, and the norm of all gradients of a model.

They are collected and written together: a row of their own would cost more than watching the step. Numbers on a device
stay there until then, leave it by one copy, and are written once they have arrived, so that nothing waits for them.
"""

from __future__ import annotations

import math
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kedge.store.columns import BINARY
from kedge.store.rows import FULL, LIGHT
from kedge.torch_internals.accelerators import to_host

_PATIENCE = 1.0
"""Most seconds that numbers are collected."""
_MANY = 256
"""Most collected numbers."""
_FLOATS, _COUNTS = ("sum", "sumsq", "min", "max"), ("nonzero", "nonfinite")


class SentNumber(NamedTuple):
    """A number on its way from a device.

    Attributes:
        host: The numbers that were sent together.
        place: Its index among them.
        arrived: The event after which it can be read; None if it can be read now.
    """

    host: Tensor
    place: int
    arrived: torch.Event | None

    def ready(self) -> bool:
        """Whether it has arrived, so that reading does not wait."""
        return self.arrived is None or self.arrived.query()

    def read(self) -> float:
        """Return the number; waits for it if it has not arrived."""
        if self.arrived is not None and not self.arrived.query():
            self.arrived.synchronize()
        return float(self.host[self.place])


class Curves:
    """Collects numbers step by step, to be written together."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._since = math.inf

    def add_value(self, step: int, site: int, value: Tensor | float, *, measured: bool) -> bool:
        """Add a number, such as a loss; returns whether it is known to be non-finite."""
        level = FULL if measured else LIGHT
        if isinstance(value, Tensor):
            self._rows.append((step, site, level, 1, value, None, None, None, -1, -1))
            return False
        square = value * value if abs(value) < 1e154 else math.inf
        finite = math.isfinite(value)
        self._rows.append((step, site, level, 1, value, square, value, value, value != 0, not finite))
        return not finite

    def add_norm(self, step: int, site: int, count: int, squares: Tensor | float, *, measured: bool) -> None:
        """Add the sum of squares of `count` elements."""
        level = FULL if measured else LIGHT
        self._rows.append((step, site, level, count, math.nan, squares, math.nan, math.nan, -1, -1))

    def is_due(self) -> bool:
        """Whether the collected numbers should be written now."""
        if not self._rows:
            return False
        self._since = min(self._since, monotonic())
        return len(self._rows) >= _MANY or monotonic() - self._since > _PATIENCE

    def drop(self, step: int) -> None:
        """Drop the numbers of a step."""
        self._rows = [r for r in self._rows if r[0] != step]

    def send(self) -> None:
        """Start copying the numbers that are on devices to the host."""
        there = [
            (i, k, cell) for i, row in enumerate(self._rows) for k, cell in enumerate(row) if isinstance(cell, Tensor)
        ]
        for device in {number.device for _, _, number in there}:
            places = [(i, k, number) for i, k, number in there if number.device == device]
            host, arrived = to_host(torch.stack([number for _, _, number in places]))
            for place, (i, k, _) in enumerate(places):
                row = self._rows[i]
                self._rows[i] = (*row[:k], SentNumber(host, place, arrived), *row[k + 1 :])

    def take(self, step: int, *, wait: bool = False) -> dict[str, Any] | None:
        """Remove and return the numbers of the steps up to one, as columns of rows with a ``step``; None if empty.

        Args:
            step: The step.
            wait: Whether to wait for numbers that have not come from their devices; without, they are left for later.
        """
        if wait:
            self.send()
        rows: list[tuple[Any, ...]] = []
        later: list[tuple[Any, ...]] = []
        for row in self._rows:
            (rows if row[0] <= step and (wait or _is_here(row)) else later).append(row)
        self._rows, self._since = later, math.inf
        if not rows:
            return None
        rows = [(*r[:4], *_on_host(r[4:])) for r in rows]
        steps, site, level, count, *rest = zip(*rows, strict=True)
        columns: dict[str, Any] = dict(zip((*_FLOATS, *_COUNTS), map(np.array, rest), strict=True))
        columns |= {"step": np.array(steps), "site": np.array(site, dtype=np.int32), "count": np.array(count)}
        columns["level"], columns["calls"] = np.array(level, dtype=np.int8), np.ones(len(rows), dtype=np.int32)
        columns["sampled"] = columns["saturated"] = np.full(len(rows), -1, dtype=np.int32)
        return columns | dict.fromkeys(BINARY, [b""] * len(rows))


def _on_host(row: tuple[Any, ...]) -> tuple[Any, ...]:
    total, squares, low, high, nonzero, nonfinite = row
    if isinstance(total, SentNumber):
        number = total.read()
        return (number, number * number, number, number, int(number != 0), int(not math.isfinite(number)))
    return (total, squares.read() if isinstance(squares, SentNumber) else squares, low, high, nonzero, nonfinite)


def _is_here(row: tuple[Any, ...]) -> bool:
    """Whether every number of a row can be read without waiting."""
    return all(cell.ready() if isinstance(cell, SentNumber) else not isinstance(cell, Tensor) for cell in row)


def number_of(value: Tensor) -> Tensor | float:
    """Return the mean of a tensor that backward began at, as a number; on a device, as a tensor there."""
    value = value.detach()
    if not (value.is_floating_point() or value.is_complex()):
        return math.nan
    value = value.abs() if value.is_complex() else value
    if value.numel() != 1:
        value = value.float().mean()
    if value.is_cpu:
        return float(value)
    with torch.no_grad():
        return value.reshape(()).float().clone()
