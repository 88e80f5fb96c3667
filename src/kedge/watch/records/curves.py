"""Single numbers of every watched step: the loss, and the norm of all gradients of a model.

They wait for each other and are written together: a row of their own would cost more than the step's watching.
Numbers on a device are kept there until then, so that nothing waits for it in between.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.store.columns import BINARY
from kedge.store.rows import FULL, LIGHT

_PATIENCE = 1.0
"""For how many seconds numbers wait at most."""
_MANY = 256
"""How many numbers wait at most."""
_FLOATS, _COUNTS = ("sum", "sumsq", "min", "max"), ("nonzero", "nonfinite")


class Curves:
    """Takes numbers step by step, and writes them together."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, Any, Any, Any, Any, int, int]] = []
        self._since = math.inf

    def add_value(self, step: int, site: int, value: Tensor | float, *, measured: bool) -> bool:
        """Take a number, such as a loss; returns whether it is known not to be finite."""
        level = FULL if measured else LIGHT
        if isinstance(value, Tensor):
            self._rows.append((step, site, level, 1, value, None, None, None, -1, -1))
            return False
        square = value * value if abs(value) < 1e154 else math.inf
        finite = math.isfinite(value)
        self._rows.append((step, site, level, 1, value, square, value, value, value != 0, not finite))
        return not finite

    def add_norm(self, step: int, site: int, count: int, squares: Tensor | float, *, measured: bool) -> None:
        """Take the sum of squares of `count` elements."""
        level = FULL if measured else LIGHT
        self._rows.append((step, site, level, count, math.nan, squares, math.nan, math.nan, -1, -1))

    def is_due(self) -> bool:
        """Whether what waits should be written."""
        if not self._rows:
            return False
        self._since = min(self._since, time.monotonic())
        return len(self._rows) >= _MANY or time.monotonic() - self._since > _PATIENCE

    def drop(self, step: int) -> None:
        """Forget the numbers of a step."""
        self._rows = [r for r in self._rows if r[0] != step]

    def take(self, step: int) -> dict[str, Any] | None:
        """Hand over what waits of the steps up to one, as columns of rows, ``step`` among them."""
        rows, later = [r for r in self._rows if r[0] <= step], [r for r in self._rows if r[0] > step]
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
    if isinstance(total, Tensor):
        number = float(total)
        return (number, number * number, number, number, int(number != 0), int(not math.isfinite(number)))
    return (total, float(squares) if isinstance(squares, Tensor) else squares, low, high, nonzero, nonfinite)


def number_of(value: Tensor) -> Tensor | float:
    """Return the mean of what backward began at, as a number; on a device as a tensor there."""
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
