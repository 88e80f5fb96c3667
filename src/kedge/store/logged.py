"""What a program logged, by name: see `kedge.log`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kedge.store.events import LoggedEvent
from kedge.store.rows import Floats, Ints


@dataclass(frozen=True, eq=False)
class LoggedSeries:
    """The numbers that a program logged under one name.

    Attributes:
        steps: The steps, sorted, each once.
        values: The value of each of them.
    """

    steps: Ints
    values: Floats


def logged_in(events: Iterable[LoggedEvent]) -> dict[str, LoggedSeries]:
    """Return the numbers in some events, by name, in the order in which the names came first."""
    found: dict[str, dict[int, float]] = {}
    for event in events:
        numbers = found.setdefault(event.name, {})
        numbers.update(zip(event.steps, map(float, event.values), strict=True))
    series = {}
    for name, numbers in found.items():
        steps = np.array(sorted(numbers), dtype=np.int64)
        values = np.array([numbers[step] for step in steps.tolist()], dtype=np.float64)
        series[name] = LoggedSeries(steps, values)
    return series
