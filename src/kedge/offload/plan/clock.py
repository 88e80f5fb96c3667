"""When things happened: on the host, or on a device without waiting for it."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class TimingClock(Protocol):
    """Marks moments now, and returns the time between two of them later."""

    def mark(self) -> Any:
        """Mark this moment."""

    def between(self, first: Any, last: Any) -> float:
        """Return the seconds between two marks; it may wait for them."""


class HostClock:
    """The time of the host, where what is asked for is done when the call returns."""

    def mark(self) -> float:
        """Read the clock."""
        return time.perf_counter()

    def between(self, first: float, last: float) -> float:
        """Subtract."""
        return last - first


class DeviceClock:
    """The time of a CUDA device: its events, on the stream that the program computes on.

    Where the host makes the device wait, the time between two events is that of the wait.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Wait for the later one, and ask."""
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def clock_of(device: torch.device) -> TimingClock:
    """Return the clock of a device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
