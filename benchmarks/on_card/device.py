"""What the benchmarks run on: the accelerator of this PyTorch, or the CPU where there is none."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kedge.torch_internals import accelerators

HELD = 40_000_000
"""The cycles for which `Device.hold` keeps a card busy: some 20 ms."""
_WAITED = "called a synchronizing"


class Device:
    """Time, memory and waits of the accelerator, or of the CPU.

    Attributes:
        there: Whether there is an accelerator.
        device: It.
        kind: Its type, as PyTorch calls it.
    """

    def __init__(self) -> None:
        self.there = torch.accelerator.is_available()
        self.device = torch.device("cpu")
        if self.there:
            self.device = torch.device(torch.accelerator.current_accelerator().type, 0)
            torch.zeros(1, device=self.device)  # from here on it is in use, and has a name
        self.kind = self.device.type
        self._module: Any = torch.get_device_module(self.kind)
        self._has_clock = self.there and accelerators.has_clock(self.device)
        self._has_memory = self.there and _answers(torch.accelerator.memory_allocated)

    def lacks(self) -> Iterator[str]:
        """Yield what this device lacks, with the consequence."""
        if not self.there:
            yield "no accelerator: these figures mean nothing"
            return
        if not self._has_clock:
            yield "no events that take the time: the host's clock is read, after waiting"
        if not self._has_memory:
            yield "no statistics of its memory: peaks are 0"
        if not accelerators.has_streams(self.device):
            yield "no streams: copies do not run beside the computation"
        if accelerators.pinned((1,), torch.uint8) is None:
            yield "no pinned memory of the host: the program waits for copies"

    def synchronize(self) -> None:
        """Wait until all that was queued is done."""
        accelerators.synchronize(self.device)

    def seconds(self, step: Callable[[], Any], times: int) -> float:
        """Return the seconds of a step, from an idle device to an idle device."""
        self.synchronize()
        begun = time.perf_counter()
        for _ in range(times):
            step()
        self.synchronize()
        return (time.perf_counter() - begun) / times

    def host_seconds(self, step: Callable[[], Any], times: int) -> float:
        """Return the seconds that the host takes to queue a step, beginning with an idle device."""
        self.synchronize()
        begun = time.perf_counter()
        for _ in range(times):
            step()
        taken = time.perf_counter() - begun
        self.synchronize()
        return taken / times

    def device_seconds(self, work: Callable[[], Any]) -> float:
        """Return the seconds that a device takes for work that was queued before it began.

        Where it cannot be held, it may wait for the host in between, and that counts.
        """
        self.synchronize()
        self.hold()
        begun = self._mark()
        work()
        ended = self._mark()
        if not self._has_clock:
            return ended - begun
        ended.synchronize()
        return begun.elapsed_time(ended) / 1e3

    def hold(self) -> None:
        """Keep a card busy for some 20 ms, so that what is queued now runs without gaps."""
        sleep = getattr(self._module, "_sleep", None)
        if sleep is not None:
            sleep(HELD)

    def _mark(self) -> Any:
        if self._has_clock:
            return accelerators.timed_mark(self.device)
        self.synchronize()
        return time.perf_counter()

    def watch_memory(self) -> int:
        """Begin to look for the peak; return the bytes that tensors take now."""
        self.synchronize()
        if not self._has_memory:
            return 0
        torch.accelerator.reset_peak_memory_stats()
        return torch.accelerator.memory_allocated()

    def peak(self) -> int:
        """Return the most bytes that tensors took since."""
        self.synchronize()
        return torch.accelerator.max_memory_allocated() if self._has_memory else 0

    def size(self) -> int:
        """Return the bytes of the device's memory; 0 where it does not tell."""
        properties = getattr(self._module, "get_device_properties", None)
        if not self.there or properties is None:
            return 0
        return int(properties(self.device).total_memory)

    def clean(self) -> None:
        """Give back what nothing needs any more: memory of the device, and what was pinned for it."""
        gc.collect()
        if not self.there:
            return
        self.synchronize()
        torch.accelerator.empty_cache()
        pinned = getattr(torch._C, "_host_emptyCache", None)
        if pinned is not None and self.kind == "cuda":
            pinned()

    def waits(self, work: Callable[[], Any]) -> int | None:
        """Return how often the host waited for the device in some work; None where nobody counts."""
        self.synchronize()
        if hasattr(self._module, "set_sync_debug_mode"):
            return self._warned(work)
        if hasattr(self._module, "reset_counts"):
            self._module.reset_counts()
            work()
            return sum(self._module.counts()["syncs"].values())
        work()
        return None

    def _warned(self, work: Callable[[], Any]) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._module.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                self._module.set_sync_debug_mode("default")
        return sum(_WAITED in str(warning.message) for warning in caught)


def _answers(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except RuntimeError:  # PyTorch's answer where a device does not tell
        return False
    return True
