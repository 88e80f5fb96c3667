"""Single numbers of every watched step: the loss, and the norm of all gradients of a model.

They are collected and written together: a row of their own would cost more than watching the step.
Numbers on a device stay there until then, so that nothing waits for them in between.

# Note [Late news]
Of a step on a device it is known only later that its loss or a gradient is not finite. So its
numbers are copied together, after a second or some hundred steps, and what has arrived is looked at
in a later step. Until then the program may be some hundred steps further; but each number has its
own step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain
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
_KEPT = 32
"""Most steps of which gradients are written because they are not finite."""
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


class Arrived(NamedTuple):
    """A number that has arrived from a device, and is not finite; see Note [Late news].

    Attributes:
        step: Its step.
        site: The site of a loss or of the norm of all gradients; None for gradients that were
            checked.
        is_nan: Whether it is NaN, and not infinite.
    """

    step: int
    site: int | None
    is_nan: bool


class Curves:
    """Collects numbers step by step, to be written together.

    Args:
        departures: Takes numbers on devices to the host.

    Attributes:
        news: Numbers that have arrived from a device and are not finite, in the order of their
            steps; whoever reads them takes them out.
        last_sound: The last step of which gradients on a device were checked and are finite.
    """

    def __init__(self, departures: Departures | None = None) -> None:
        self.news: list[Arrived] = []
        self.last_sound = -1
        self._rows: list[_Row] = []
        self._departed: list[_Row] = []
        self._checks: list[list[_Row]] = []
        self._departed_checks: list[list[_Row]] = []
        self._was_bad = False
        self._left = _KEPT
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

    def add_check(self, step: int, norms: Iterable[tuple[int, int, Tensor]]) -> None:
        """Add the norms of a few gradients on a device: of each the site, the count and the norm.

        They are written only if one of them is not finite, while all were at the last check: a
        program may go on with such gradients for long, as its loss scale may skip them.
        """
        nan = math.nan
        rows = [(step, site, LIGHT, n, nan, norm, nan, nan, -1, -1, -1) for site, n, norm in norms]
        self._checks.append(rows)

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
        self._checks = [check for check in self._checks if check[0][0] != step]
        self._departed_checks = [c for c in self._departed_checks if c[0][0] != step]

    def depart(self, step: int) -> None:
        """Have the numbers of the steps up to one copied to the host, if they are on devices."""
        rows = [r for r in self._rows if r[0] <= step]
        checks = [check for check in self._checks if check[0][0] <= step]
        self._rows = [r for r in self._rows if r[0] > step]
        self._checks = [check for check in self._checks if check[0][0] > step]
        self._since = math.inf
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for row in chain(rows, *checks):
            for part in row:
                if isinstance(part, Tensor):
                    alike.setdefault((part.device, part.dtype), []).append(part)

        places: dict[int, _OnItsWay] = {}
        for numbers in alike.values():
            copy = self._departures.add(torch.stack(numbers).float())
            for i, number in enumerate(numbers):
                places[id(number)] = _OnItsWay(copy, i)
        self._departed += _placed(rows, places)
        self._departed_checks += [_placed(check, places) for check in checks]

    def look(self, step: int) -> None:
        """Send the numbers on devices on their way if that is due, and look at what has arrived."""
        if self.is_due():
            self.depart(step)
            self._departures.send()
        self.arrive()

    def arrive(self, *, wait: bool = False) -> None:
        """Look at the numbers that have arrived from devices; see Note [Late news].

        Args:
            wait: Whether to wait for the others.
        """
        for at, row in enumerate(self._departed):
            if not any(isinstance(part, _OnItsWay) for part in row):
                continue
            if not wait and not _has_arrived(row):
                continue
            self._departed[at] = known = _on_host(row)
            step, site = row[:2]
            number = known[5]
            if not math.isfinite(number):
                self.news.append(Arrived(step, site, math.isnan(number)))
        while self._departed_checks:
            check = self._departed_checks[0]
            if not wait and not all(map(_has_arrived, check)):
                return
            del self._departed_checks[0]
            self._arrived_check([_on_host(row) for row in check])

    def _arrived_check(self, check: list[_Row]) -> None:
        """Keep the norms of some gradients if one of them is not finite, and that is news."""
        squared = [(*row[:5], row[5] ** 2, *row[6:]) for row in check]
        step = check[0][0]
        bad = [row[5] for row in check if not math.isfinite(row[5])]
        if not bad:
            self.last_sound = step
        if bad and not self._was_bad and self._left:
            self._left -= 1
            self._departed += squared
            self.news.append(Arrived(step, None, any(map(math.isnan, bad))))
        self._was_bad = bool(bad)

    def take(self, step: int, *, wait: bool = False) -> dict[str, Any] | None:
        """Remove and return the numbers of the steps up to one; None if there are none.

        They are columns of rows with a ``step``.

        Args:
            step: The step.
            wait: Whether to wait for numbers that are still on their way from a device, which else
                stay here.
        """
        self.depart(step)
        self.arrive(wait=wait)
        rows = []
        waiting = []
        for row in self._departed:
            if row[0] <= step and _has_arrived(row):
                rows.append(row)
            else:
                waiting.append(row)
        self._departed = waiting
        if not rows:
            return None
        rows.sort(key=lambda row: row[0])

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


def _placed(rows: Iterable[_Row], places: Mapping[int, _OnItsWay]) -> list[_Row]:
    return [tuple(places.get(id(part), part) for part in row) for row in rows]


def _has_arrived(row: _Row) -> bool:
    return all(part.copy.ready() for part in row if isinstance(part, _OnItsWay))


def _on_host(row: _Row) -> _Row:
    step, site, level, count, total, squares, *rest = row
    if isinstance(total, _OnItsWay):
        return (step, site, level, count, *_statistics_of(float(total.copy.numpy()[total.at])))
    if isinstance(squares, _OnItsWay):
        squares = float(squares.copy.numpy()[squares.at])
    return (step, site, level, count, total, squares, *rest)


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
