"""The times of modules in measured steps: see ``kedge run --time``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kedge.store.events import ModuleTimesEvent
from kedge.store.rows import Floats, Ints


@dataclass(frozen=True, eq=False)
class TimedModules:
    """The seconds that modules took, by step.

    Attributes:
        paths: The modules, in the order of their first calls.
        steps: The timed steps, in order.
        forward: Seconds of the forward, a row for each module and a column for each step; NaN
            where the module was not called.
        backward: Those of the backward; NaN where there was none.
    """

    paths: tuple[str, ...]
    steps: Ints
    forward: Floats
    backward: Floats

    @cached_property
    def medians(self) -> dict[str, tuple[float, float]]:
        """The median seconds of each module, of its forward and its backward; NaN without any."""
        forward = [_median(row) for row in self.forward]
        backward = [_median(row) for row in self.backward]
        return dict(zip(self.paths, zip(forward, backward, strict=True), strict=True))


def timed_in(events: Sequence[ModuleTimesEvent]) -> TimedModules | None:
    """Return the times in some events; None without any."""
    if not events:
        return None
    by_step = {event.step: event for event in events}
    steps = sorted(by_step)
    places: dict[str, int] = {}
    for step in steps:
        for path in by_step[step].paths:
            places.setdefault(path, len(places))
    forward = np.full((len(places), len(steps)), np.nan)
    backward = np.full((len(places), len(steps)), np.nan)
    for column, step in enumerate(steps):
        event = by_step[step]
        rows = [places[path] for path in event.paths]
        forward[rows, column] = np.array(event.forward, dtype=np.float64)
        backward[rows, column] = np.array(event.backward, dtype=np.float64)
    return TimedModules(tuple(places), np.array(steps, dtype=np.int64), forward, backward)


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    if not len(known):
        return float("nan")
    return float(np.median(known))
