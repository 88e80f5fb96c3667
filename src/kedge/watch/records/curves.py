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
from collections import deque
from collections.abc import Iterable
from enum import Enum
from operator import itemgetter
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
"""Step, site, level and count; then sum, sum of squares, extremes and counts."""


class _Kind(Enum):
    """What a number on a device is: a single one, a sum of squares, or the norm of a gradient that is checked."""

    VALUE = 0
    SQUARES = 1
    CHECK = 2


class _Away(NamedTuple):
    """A number on a device.

    Attributes:
        step: Its step.
        site: Its site.
        level: The level of the step.
        elements: How many elements it stands for.
        number: The number, a tensor of one element.
        of: What it is.
    """

    step: int
    site: int
    level: int
    elements: int
    number: Tensor
    of: _Kind


class _OnTheirWay(NamedTuple):
    """Numbers that are copied from devices together.

    Attributes:
        copies: The numbers of each device and dtype, with their copy.
        dropped: Steps whose numbers are no data.
    """

    copies: list[tuple[list[_Away], HostCopy]]
    dropped: set[int]

    def are_there(self) -> bool:
        """Whether all have arrived, so that reading does not wait."""
        return all(copy.ready() for _, copy in self.copies)


_step_and_site = itemgetter(0, 1)


class Arrived(NamedTuple):
    """A number that has arrived from a device, and is not finite; see Note [Late news].

    Attributes:
        step: Its step.
        site: The site of a loss or of the norm of all gradients; None for gradients that were
            checked.
    """

    step: int
    site: int | None


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
        self._away: list[_Away] = []
        self._on_their_way: deque[_OnTheirWay] = deque()
        self._was_bad = False
        self._left = _KEPT
        self._departures = departures or Departures()
        self._since = math.inf

    def add_value(self, step: int, site: int, value: Tensor | float, *, measured: bool) -> bool:
        """Add a number, such as a loss; returns whether it is known to be non-finite."""
        level = FULL if measured else LIGHT
        if isinstance(value, Tensor):
            self._away.append(_Away(step, site, level, 1, value, _Kind.VALUE))
            return False
        self._rows.append((step, site, level, 1, *_statistics_of(value)))
        return not math.isfinite(value)

    def add_norm(
        self, step: int, site: int, count: int, squares: Tensor | float, *, measured: bool
    ) -> None:
        """Add the sum of squares of `count` elements."""
        level = FULL if measured else LIGHT
        if isinstance(squares, Tensor):
            self._away.append(_Away(step, site, level, count, squares, _Kind.SQUARES))
        else:
            self._rows.append((step, site, level, count, *_of_squares(squares)))

    def add_check(self, step: int, norms: Iterable[tuple[int, int, Tensor]]) -> None:
        """Add the norms of a few gradients on a device: of each the site, the count and the norm.

        They are written only if one of them is not finite, while all were at the last check: a
        program may go on with such gradients for long, as its loss scale may skip them.
        """
        self._away += [_Away(step, site, LIGHT, n, norm, _Kind.CHECK) for site, n, norm in norms]

    def is_due(self) -> bool:
        """Whether the collected numbers should be written now."""
        if not self._rows and not self._away:
            return False
        self._since = min(self._since, monotonic())
        many = len(self._rows) >= _MANY or len(self._away) >= 4 * _MANY
        return many or monotonic() - self._since > _PATIENCE

    def drop(self, step: int) -> None:
        """Drop the numbers of a step."""
        self._rows = [row for row in self._rows if row[0] != step]
        self._away = [away for away in self._away if away.step != step]
        for each in self._on_their_way:
            each.dropped.add(step)

    def depart(self, step: int) -> None:
        """Have the numbers of the steps up to one copied to the host, if they are on devices."""
        self._since = math.inf
        if not self._away:
            return
        leaving = [away for away in self._away if away.step <= step]
        self._away = [away for away in self._away if away.step > step]
        alike: dict[tuple[torch.device, torch.dtype], list[_Away]] = {}
        for away in leaving:
            alike.setdefault((away.number.device, away.number.dtype), []).append(away)
        copies = []
        for some in alike.values():
            numbers = torch.stack([away.number for away in some]).float()
            copies.append((some, self._departures.add(numbers)))
        if copies:
            self._on_their_way.append(_OnTheirWay(copies, set()))

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
        while self._on_their_way and (wait or self._on_their_way[0].are_there()):
            self._look_at(self._on_their_way.popleft())

    def _look_at(self, arrived: _OnTheirWay) -> None:
        checks: dict[int, list[tuple[_Away, float]]] = {}
        for some, copy in arrived.copies:
            for away, number in zip(some, copy.numpy().tolist(), strict=True):
                if away.step in arrived.dropped:
                    continue
                if away.of is _Kind.CHECK:
                    checks.setdefault(away.step, []).append((away, number))
                    continue
                statistics = (
                    _statistics_of(number) if away.of is _Kind.VALUE else _of_squares(number)
                )
                self._rows.append((*away[:4], *statistics))
                if not math.isfinite(number):
                    self.news.append(Arrived(away.step, away.site))
        for step in sorted(checks):
            self._look_at_check(step, checks[step])

    def _look_at_check(self, step: int, norms: list[tuple[_Away, float]]) -> None:
        """Keep the norms of some gradients if one of them is not finite, and that is news."""
        bad = [norm for _, norm in norms if not math.isfinite(norm)]
        if not bad:
            self.last_sound = step
        if bad and not self._was_bad and self._left:
            self._left -= 1
            self._rows += [(*away[:4], *_of_squares(norm**2)) for away, norm in norms]
            self.news.append(Arrived(step, None))
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
        rows = [row for row in self._rows if row[0] <= step]
        if not rows:
            return None
        self._rows = [row for row in self._rows if row[0] > step]
        rows.sort(key=_step_and_site)

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


def _of_squares(squares: float) -> tuple[float, float, float, float, int, int, int]:
    """Return the statistics of many numbers of which the sum of squares is known, in the order of a row."""
    nan = math.nan
    return nan, squares, nan, nan, -1, -1, -1


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
