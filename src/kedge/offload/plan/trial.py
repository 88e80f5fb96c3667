"""The trial of a plan: steps under it, and steps in which everything is kept, take turns.

# Note [A promise]
The prediction of a plan is a lower bound: it comes from one step, and does not include all of
Kedge's own work, nor what moving bytes takes from the rest of the machine. So a plan for a limit of
time is tried in the steps that follow it: in half of them everything is kept, and each step is
compared with its neighbour. Which of two neighbours comes first changes from pair to pair, since a
program's steps may alternate themselves; such pairs differ in both directions, and the middle of
them in none. A plan with which all pairs but one take longer than promised is made again for fewer
bytes, as many as the promise is of what was measured, since the cost grows with the bytes. If that
plan takes too long as well, everything is kept from then on, and a warning says so. No plan is
tried where there may be no room to keep everything for a step.
"""

from __future__ import annotations

import sys
from math import exp, log
from statistics import median
from typing import Any, NamedTuple

import torch

from kedge.files.pressure import Pressure
from kedge.offload.plan.timing import TimingClock
from kedge.torch_internals import accelerators

if sys.platform != "win32":
    import resource

MARGIN = 0.03
"""By how much a measured slowdown may be above the promise."""
_STEPS = 6
"""Steps of each kind, an even number; the first step under a plan does not count."""
_SPARE = 1.5
"""The room that must be there, as a multiple of the bytes that a plan does not keep."""


class MeasuredSlowdown(NamedTuple):
    """The time of a step under a plan as a multiple of that with everything kept.

    Attributes:
        median: The median of the pairs of steps; of the middle two, the geometric mean.
        exceeded: What all pairs but one reached, so that it is hardly by chance.
    """

    median: float
    exceeded: float


class Trial:
    """The times of steps under a plan and of steps in which everything is kept, in turns.

    Args:
        clock: Marks the moments.
    """

    def __init__(self, clock: TimingClock) -> None:
        self._clock = clock
        self._marks: list[Any] = []

    @property
    def keeps(self) -> bool:
        """Whether everything is kept in the current step."""
        return len(self._marks) % 4 in (0, 1) and bool(self._marks)

    @property
    def is_over(self) -> bool:
        """Whether all steps were timed."""
        return len(self._marks) == 2 * _STEPS + 1

    def turn(self) -> None:
        """End a step."""
        self._marks.append(self._clock.mark())

    def measured(self) -> MeasuredSlowdown:
        """Return the times of the steps, in pairs of neighbours that other load meets alike."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        times = [self._clock.between(first, last) for first, last in pairs]
        ratios: list[float] = []
        for number, (first, second) in enumerate(zip(times[::2], times[1::2], strict=True)):
            kept, planned = first, second
            if number % 2:
                kept, planned = second, first
            if kept and planned:
                ratios.append(planned / kept)
            else:
                ratios.append(1.0)
        ratios.sort()
        return MeasuredSlowdown(exp(median(map(log, ratios))), ratios[1])


def has_room(nbytes: int, device: torch.device) -> bool:
    """Whether so many more bytes fit into a device's memory for certain."""
    room = room_on(device)
    return room is not None and room >= nbytes * _SPARE


def room_on(device: torch.device) -> int | None:
    """Return the bytes that are free in a device's memory, or in that of the machine; None if unknown."""
    if accelerators.is_accelerator(device):
        return accelerators.free_memory(device)
    if _is_limited():
        return None
    return Pressure().room()


def _is_limited() -> bool:
    """Whether this process may not take all memory that is free."""
    if sys.platform == "win32":
        return False
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(each)[0] != resource.RLIM_INFINITY for each in limits)
