"""Single numbers of every watched step: the loss, and the norm of all gradients of a model.

They are collected and written together: a row of their own would cost more than watching the step.
Numbers on a device stay there until then, so that nothing waits for them in between.
"""

from __future__ import annotations

import math
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kedge.actions.measure.table import Departures, HostCopy
from kedge.sites.leaves import own_part
from kedge.sites.spread import spread_of
from kedge.store.columns import BINARY
from kedge.store.rows import FULL, LIGHT

_PATIENCE = 1.0
"""Most seconds that numbers are collected."""
_MANY = 256
"""Most collected numbers."""
_FLOATS = ("sum", "sumsq", "min", "max")
_COUNTS = ("nonzero", "nonfinite", "nan")


_Row: TypeAlias = tuple[Any, ...]
"""Step, site, level and count; then sum and sum of squares, which may be on a device.

Extremes and counts follow.
"""


class _OnItsWay(NamedTuple):
    """A number that is copied from a device with others: the copy, and its place there."""

    copy: HostCopy
    at: int


class Curves:
    """Collects numbers step by step, to be written together.

    Args:
        departures: Takes numbers on devices to the host.
    """

    def __init__(self, departures: Departures | None = None) -> None:
        self._rows: list[_Row] = []
        self._departed: list[_Row] = []
        self._departures = departures or Departures()
        self._since = math.inf

    def add_value(self, step: int, site: int, value: Tensor | float, *, measured: bool) -> bool:
        """Add a number, such as a loss; returns whether it is known to be non-finite."""
        level = FULL if measured else LIGHT
        if isinstance(value, Tensor):
            self._rows.append((step, site, level, 1, value, None, None, None, -1, -1, -1))
            return False
        self._rows.append((step, site, level, 1, *_statistics_of(value)))
        return not math.isfinite(value)

    def add_norm(
        self, step: int, site: int, count: int, squares: Tensor | float, *, measured: bool
    ) -> None:
        """Add the sum of squares of `count` elements."""
        level = FULL if measured else LIGHT
        nan = math.nan
        self._rows.append((step, site, level, count, nan, squares, nan, nan, -1, -1, -1))

    def is_due(self) -> bool:
        """Whether the collected numbers should be written now."""
        if not self._rows:
            return False
        self._since = min(self._since, monotonic())
        return len(self._rows) >= _MANY or monotonic() - self._since > _PATIENCE

    def drop(self, step: int) -> None:
        """Drop the numbers of a step."""
        self._rows = [r for r in self._rows if r[0] != step]
        self._departed = [r for r in self._departed if r[0] != step]

    def depart(self, step: int) -> None:
        """Have the numbers of the steps up to one copied to the host, if they are on devices."""
        rows = [r for r in self._rows if r[0] <= step]
        self._rows = [r for r in self._rows if r[0] > step]
        self._since = math.inf
        by_device: dict[torch.device, list[Tensor]] = {}
        for row in rows:
            for part in row:
                if isinstance(part, Tensor):
                    by_device.setdefault(part.device, []).append(part)

        places: dict[int, _OnItsWay] = {}
        for numbers in by_device.values():
            copy = self._departures.add(torch.stack(numbers))
            for i, number in enumerate(numbers):
                places[id(number)] = _OnItsWay(copy, i)
        for row in rows:
            self._departed.append(tuple(places.get(id(part), part) for part in row))

    def take(self, step: int, *, wait: bool = False) -> dict[str, Any] | None:
        """Remove and return the numbers of the steps up to one; None if there are none.

        They are columns of rows with a ``step``.

        Args:
            step: The step.
            wait: Whether to wait for numbers that are still on their way from a device, which else
                stay here.
        """
        self.depart(step)
        rows = []
        waiting = []
        for row in self._departed:
            if row[0] <= step and (wait or _has_arrived(row)):
                rows.append((*row[:4], *_on_host(row[4:])))
            else:
                waiting.append(row)
        self._departed = waiting
        if not rows:
            return None

        steps, site, level, count, *rest = zip(*rows, strict=True)
        statistics = zip((*_FLOATS, *_COUNTS), map(np.array, rest), strict=True)
        unknown = np.full(len(rows), -1, dtype=np.int32)
        return {
            **dict(statistics),
            "step": np.array(steps),
            "site": np.array(site, dtype=np.int32),
            "count": np.array(count),
            "level": np.array(level, dtype=np.int8),
            "calls": np.ones(len(rows), dtype=np.int32),
            "sampled": unknown,
            "saturated": unknown,
            **dict.fromkeys(BINARY, [b""] * len(rows)),
        }


def _has_arrived(row: _Row) -> bool:
    return all(part.copy.ready() for part in row if isinstance(part, _OnItsWay))


def _on_host(row: tuple[Any, ...]) -> tuple[Any, ...]:
    total, squares, *rest = row
    if isinstance(total, _OnItsWay):
        return _statistics_of(float(total.copy.numpy()[total.at]))
    if isinstance(squares, _OnItsWay):
        squares = float(squares.copy.numpy()[squares.at])
    return (total, squares, *rest)


def _statistics_of(value: float) -> tuple[float, float, float, float, int, int, int]:
    """Return the statistics of one number, in the order of a row."""
    return (
        value,
        value * value,
        value,
        value,
        int(value != 0),
        int(not math.isfinite(value)),
        int(math.isnan(value)),
    )


def number_of(value: Tensor) -> Tensor | float | None:
    """Return the mean of a tensor that backward began at, as a number.

    On a device it is a tensor there.

    Of a distributed tensor it is the mean of this rank's part; None if that is empty, or an addend
    of a sum to come.
    """
    spread = spread_of(value)
    value = own_part(value.detach())
    if spread is not None:
        is_addend = spread.partial and not _is_bad(value)
        if is_addend or not value.numel():
            return None
    if value.is_complex():
        value = value.abs()
    elif not value.is_floating_point():
        return math.nan
    if value.numel() != 1:
        value = value.float().mean()
    if value.is_cpu:
        return float(value)
    with torch.no_grad():
        return value.reshape(()).float().clone()


def _is_bad(value: Tensor) -> bool:
    """Whether a tensor of this process's memory is known to be not finite; on a device it is not read."""
    return value.is_cpu and not bool(torch.isfinite(value).all())
