"""The statistics of one step on one device: a table, copied to the host once. For the CPU see `kedge.actions.measure.host`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.actions.measure.reduce import STATISTICS, StatisticsRow

_BLOCK = 256


class Snapshot(NamedTuple):
    """A table during its copy to the host.

    Attributes:
        rows: One row a measurement.
        wide: Channel maxima and drawn elements, one measurement after another.
        arrived: The CUDA event after which they can be read; None if they can be read now.
        spans: CUDA events before and after each measurement.
    """

    rows: NDArray[Any]
    wide: NDArray[np.float32]
    arrived: Any
    spans: list[tuple[Any, Any]]

    def ready(self) -> bool:
        """Whether the table has arrived, so that reading does not wait."""
        return self.arrived is None or bool(self.arrived.query())

    def seconds(self) -> float:
        """The seconds that the device spent measuring; 0 for the host, which has its own clock."""
        return float(sum(start.elapsed_time(end) for start, end in self.spans)) / 1000

    def numpy(self) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The rows and the wide numbers; waits for them if they have not arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.rows, self.wide


class DeviceTable:
    """Rows of float32 on one device, allocated one by one and reused in the next step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: list[Tensor] = []
        self.slots: list[StatisticsRow] = []
        self.used = 0
        self.wide = torch.empty(0, dtype=torch.float32, device=device)
        self.wide_used = 0
        self.spans: list[tuple[Any, Any]] = []

    def now(self) -> Any:
        """Record a CUDA event, without waiting for it; None on other devices."""
        if self.device.type != "cuda":
            return None
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    def slot(self) -> StatisticsRow:
        """Return the next row, filled with NaN, which means not measured."""
        if self.used == len(self.slots):
            self._grow()
        slot = self.slots[self.used]
        self.used += 1
        return slot

    def _grow(self) -> None:
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(mode=False):
            block = torch.full((_BLOCK, len(STATISTICS)), float("nan"), dtype=torch.float32, device=self.device)
            self.slots.extend(map(StatisticsRow, block))
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
        whole = torch.cat([*(part.reshape(-1) for part in parts), self.wide[:wide]])
        for part in parts:
            part.fill_(float("nan"))
        host, arrived = to_host(whole)
        size = used * len(STATISTICS)
        return Snapshot(host[:size].view(-1, len(STATISTICS)).numpy(), host[size:].numpy(), arrived, spans)


def to_host(whole: Tensor) -> tuple[Tensor, Any]:
    """Start copying a tensor to the host; returns the copy and the CUDA event of its arrival.

    The copy runs on a stream of its own, so that the program's next kernels do not wait for it either. The event is
    None for a tensor that can be read at once: one of the CPU, or of a device other than CUDA.
    """
    device = whole.device
    if device.type == "cpu":
        return whole, None
    if device.type != "cuda":
        return whole.cpu(), None
    stream = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    host = torch.empty(whole.shape, dtype=whole.dtype, device="cpu", pin_memory=True)
    with torch.cuda.stream(stream):
        host.copy_(whole, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(stream)
    whole.record_stream(stream)
    return host, arrived


_streams: dict[torch.device, Any] = {}
