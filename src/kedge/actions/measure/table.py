"""The statistics of one step on one device: a table, copied to the host once. For the CPU see `kedge.actions.measure.host`."""

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


class Snapshot(NamedTuple):
    """A table during its copy to the host.

    Attributes:
        rows: One or more rows a measurement; see `Measured`.
        wide: Channel maxima and drawn elements, one measurement after another.
        arrived: The event after which they can be read; None if they can be read now.
        spans: Events before and after each measurement.
    """

    rows: NDArray[Any]
    wide: NDArray[np.float32]
    arrived: torch.Event | None
    spans: list[tuple[torch.Event, torch.Event]]

    def ready(self) -> bool:
        """Whether the table has arrived, so that reading does not wait."""
        return self.arrived is None or bool(self.arrived.query())

    def seconds(self) -> float:
        """The seconds that the device spent measuring, as far as it tells; 0 for the host, which has its own clock."""
        return sum(accelerators.seconds(start, end) or 0.0 for start, end in self.spans)

    def numpy(self) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The rows and the wide numbers; waits for them if they have not arrived."""
        if self.arrived is not None and not self.arrived.query():
            self.arrived.synchronize()
        return self.rows, self.wide


class DeviceTable:
    """Rows on one device, allocated one by one and reused in the next step; in float64 where the native kernel writes them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_native = device, on_device.available(device)
        self.dtype = torch.float64 if self.is_native else torch.float32
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
        end = None if start is None else accelerators.timed_mark(self.device)
        if start is not None and end is not None:
            self.spans.append((start, end))

    def reserve(self, count: int) -> int:
        """Return the first of the next `count` rows, which are in one block, filled with NaN, which means not measured."""
        if count > _BLOCK - self.used % _BLOCK:
            self.used += _BLOCK - self.used % _BLOCK
        first, self.used = self.used, self.used + count
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
                slot = self.slots[row] = StatisticsRow(block[index])
        return slot

    def _grow(self) -> None:
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(mode=False):
            block = torch.full((_BLOCK, len(STATISTICS)), float("nan"), dtype=self.dtype, device=self.device)
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
        start, self.wide_used = self.wide_used, self.wide_used + count
        return self.wide[start : self.wide_used]

    def take(self) -> Snapshot:
        """Start copying the used rows to the host, in one copy, and reset the table."""
        used, wide, spans = self.used, self.wide_used, self.spans
        self.used, self.wide_used, self.spans = 0, 0, []
        filled = self.blocks[: -(-used // _BLOCK)]
        parts = [block[: used - i * _BLOCK] for i, block in enumerate(filled)]
        whole = torch.cat([*(part.reshape(-1).view(torch.float32) for part in parts), self.wide[:wide]])
        for part in parts:
            part.fill_(float("nan"))
        host, arrived = accelerators.to_host(whole)
        size = whole.numel() - wide
        rows = host[:size].view(self.dtype).view(-1, len(STATISTICS))
        return Snapshot(rows.numpy(), host[size:].numpy(), arrived, spans)
