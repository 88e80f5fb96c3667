"""Clocks: of the host, or of a device without waiting for it."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from kedge.torch_internals import accelerators


class TimingClock(Protocol):
    """A clock that marks moments now, and returns the time between two marks later."""

    def mark(self) -> Any:
        """Return a mark of this moment."""

    def between(self, first: Any, last: Any) -> float:
        """Return the seconds between two marks; it may wait for them."""


class HostClock:
    """The clock of the host, where an operation is done when its call returns."""

    def mark(self) -> float:
        """Return the time in seconds."""
        return time.perf_counter()

    def between(self, first: float, last: float) -> float:
        """Return the seconds between two marks."""
        return last - first


class DeviceClock:
    """The clock of a device: events on the stream that the program computes on.

    If the device waits for the host, the time between two events includes the wait.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Return a new event, recorded on the current stream."""
        return accelerators.timed_mark(self._device)

    def between(self, first: Any, last: Any) -> float:
        """Return the seconds between two events; waits for the later one."""
        last.synchronize()
        return accelerators.seconds(first, last) or 0.0


def clock_of(device: torch.device) -> TimingClock:
    """Return the clock of a device."""
    return DeviceClock(device) if accelerators.has_clock(device) else HostClock()
