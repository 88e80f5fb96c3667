"""The statistics of one step on one device: a table, copied to the host once.

For the CPU see `kedge.actions.measure.host`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.actions.measure.reduce import STATISTICS, StatisticsRow
from kedge.native import on_device
from kedge.torch_internals import accelerators

_BLOCK = 4 * on_device.MOST
_FEW = 1 << 18
"""Up to so many numbers, 1 MB, are copied on the program's own stream."""
_WIDE = 4  # bytes of a float32, as which all numbers leave a device


class HostCopy:
    """A copy on the host of numbers of a device, under way or still to begin; see `Departures`."""

    def __init__(self, departures: Departures, *, at_once: bool) -> None:
        self._departures = departures
        self._at_once = at_once
        self._numbers: NDArray[np.float32] | None = None
        self._arrived: torch.Event | None = None

    def begin(self, numbers: NDArray[np.float32], arrived: torch.Event | None) -> None:
        """Take the numbers, which can be read after an event; None stands for now."""
        self._numbers = numbers
        self._arrived = arrived

    def ready(self) -> bool:
        """Whether the numbers have arrived, so that reading does not wait."""
        if self._numbers is None:
            return self._at_once
        if self._arrived is not None and self._arrived.query():
            self._arrived = None
        return self._arrived is None

    def numpy(self) -> NDArray[np.float32]:
        """The numbers; waits for them if they have not arrived."""
        if self._numbers is None:
            self._departures.send()
        if not self.ready() and self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        assert self._numbers is not None  # noqa: S101 - `send` has begun the copy
        return self._numbers


class Departures:
    """Collects the numbers that are to leave their devices, for one copy of each device."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, HostCopy]] = []

    def add(self, numbers: Tensor) -> HostCopy:
        """Add a flat tensor of float32; returns its copy, which has not begun yet."""
        copy = HostCopy(self, at_once=numbers.is_cpu)
        self._waiting.append((numbers, copy))
        return copy

    def send(self) -> None:
        """Start copying all that was added, in one copy for each device.

        What fails, as without memory, is tried again.
        """
        waiting = list(self._waiting)
        by_device: dict[torch.device, list[tuple[Tensor, HostCopy]]] = {}
        for numbers, copy in waiting:
            by_device.setdefault(numbers.device, []).append((numbers, copy))
        for leaving in by_device.values():
            beside = sum(numbers.numel() for numbers, _ in leaving) > _FEW
            together = leaving[0][0]
            # Beside the program its next step may already write to what is copied.
            if beside or len(leaving) > 1:
                together = torch.cat([numbers for numbers, _ in leaving])
            host, arrived = accelerators.to_host(together, beside=beside)
            everything = host.numpy()
            start = 0
            for numbers, copy in leaving:
                end = start + numbers.numel()
                copy.begin(everything[start:end], arrived)
                start = end
        del self._waiting[: len(waiting)]


class Snapshot(NamedTuple):
    """A table during its copy to the host.

    Attributes:
        copy: The rows, one or more a measurement (see `Measured`); then channel maxima and drawn
            elements, one measurement after another.
        rows: The number of rows.
        dtype: The type of the numbers in the rows.
        spans: Events before and after each measurement.
    """

    copy: HostCopy
    rows: int
    dtype: type[np.floating[Any]]
    spans: list[tuple[torch.Event, torch.Event]]

    def ready(self) -> bool:
        """Whether the table has arrived, so that reading does not wait."""
        return self.copy.ready()

    def seconds(self) -> float:
        """The seconds that the device spent measuring, as far as it tells.

        They are 0 for the host, which has its own clock.
        """
        return sum(accelerators.seconds(start, end) or 0.0 for start, end in self.spans)

    def numpy(self) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The rows and the wide numbers; waits for them if they have not arrived."""
        numbers = self.copy.numpy()
        size = self.rows * len(STATISTICS) * np.dtype(self.dtype).itemsize // _WIDE
        rows = numbers[:size].view(self.dtype).reshape(-1, len(STATISTICS))
        return rows, numbers[size:]


class DeviceTable:
    """Rows on one device, allocated one by one and reused in the next step.

    They are in float64 where the native kernel writes them.

    Args:
        device: The device.
        departures: Takes the rows to the host at the end of a step.
    """

    def __init__(self, device: torch.device, departures: Departures) -> None:
        self.device = device
        self._departures = departures
        self.is_native = on_device.available(device)
        self.blocks: list[Tensor] = []
        self.slots: dict[int, StatisticsRow] = {}
        self.used = 0
        self.wide = torch.empty(0, dtype=torch.float32, device=device)
        self.wide_used = 0
        self.spans: list[tuple[torch.Event, torch.Event]] = []

    def begin(self) -> torch.Event | None:
        """Record an event, without waiting for it; None on devices whose events have no times."""
        return accelerators.timed_mark(self.device)

    def end(self, start: torch.Event | None) -> None:
        """Record the end of a measurement, given its start."""
        if start is None:
            return
        end = accelerators.timed_mark(self.device)
        if end is not None:
            self.spans.append((start, end))

    def reserve(self, count: int) -> int:
        """Return the first of the next `count` rows.

        They are in one block, filled with NaN, which means not measured.
        """
        if count > _BLOCK - self.used % _BLOCK:
            self.used += _BLOCK - self.used % _BLOCK
        first = self.used
        self.used = first + count
        if self.used > len(self.blocks) * _BLOCK:
            self._grow()
        return first

    def place(self, row: int) -> tuple[Tensor, int]:
        """Return the block of a row, and its index there."""
        return self.blocks[row // _BLOCK], row % _BLOCK

    def slot(self, row: int) -> StatisticsRow:
        """Return a row as what PyTorch's reductions write to."""
        slot = self.slots.get(row)
        if slot is None:
            block, index = self.place(row)
            with torch.inference_mode(mode=False):
                slot = StatisticsRow(block[index])
            self.slots[row] = slot
        return slot

    def _grow(self) -> None:
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(mode=False):
            block = torch.full(
                (_BLOCK, len(STATISTICS)),
                float("nan"),
                dtype=torch.float64 if self.is_native else torch.float32,
                device=self.device,
            )
        self.blocks.append(block)

    def keep(self, numbers: Tensor) -> tuple[int, int]:
        """Copy numbers into the table; returns the range that they occupy."""
        start = self.wide_used
        self._room(numbers.numel()).copy_(numbers)
        return start, self.wide_used

    def _room(self, count: int) -> Tensor:
        """Return room for `count` more numbers."""
        if self.wide_used + count > len(self.wide):
            with torch.inference_mode(mode=False):
                more = self.wide.new_empty(max(count, len(self.wide), _BLOCK))
                self.wide = torch.cat([self.wide, more])
        start = self.wide_used
        self.wide_used = start + count
        return self.wide[start : self.wide_used]

    def take(self) -> Snapshot:
        """Have the used rows copied to the host, and reset the table."""
        used = self.used
        wide = self.wide[: self.wide_used]
        spans = self.spans
        self.used = 0
        self.wide_used = 0
        self.spans = []

        filled = self.blocks[: -(-used // _BLOCK)]
        parts = [block[: used - i * _BLOCK] for i, block in enumerate(filled)]
        numbers = [part.reshape(-1).view(torch.float32) for part in parts]
        whole = torch.cat([*numbers, wide])
        for part in parts:
            part.fill_(float("nan"))
        dtype: type[np.floating[Any]] = np.float32
        if self.is_native:
            dtype = np.float64
        return Snapshot(self._departures.add(whole), used, dtype, spans)
