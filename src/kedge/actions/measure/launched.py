"""The tables of a step on devices whose driver launches the kernel; see `kedge.native.driver`.

A value on such a device has a row in the step's `HostTable`, as any other has; its statistics come
later, from a row of a table on the device, which is copied to the host once a step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.actions.measure.table import Departures, HostCopy
from kedge.native import driver
from kedge.native.driver_library import OpenedDevice
from kedge.torch_internals import accelerators, device_graphs

COLUMNS = 8
"""Those of `kedge.actions.measure.reduce.STATISTICS`, and the seconds that the kernel took."""
SECONDS = 7
ROW_BYTES = COLUMNS * 8
DRAWN_ROWS = 3
"""How many rows the histogram of a value's drawn numbers takes, as `DRAWN_ROWS` in C."""

_ROOM = 1024
_PARTS = 4 * 512
_COUNTER_BYTES = 4


class LaunchedTable:
    """The rows of a step during their copy to the host.

    Args:
        copy: Their copy.
    """

    def __init__(self, copy: HostCopy) -> None:
        self._copy: HostCopy | None = copy
        self._rows = np.empty((0, COLUMNS))

    def ready(self) -> bool:
        """Whether they have arrived, so that reading does not wait."""
        return self._copy is None or self._copy.ready()

    def rows(self) -> NDArray[np.float64]:
        """The rows; waits for them if they have not arrived."""
        if self._copy is not None:
            there = self._copy.numpy().view(np.float64).reshape(-1, COLUMNS)
            self._rows = there.copy()  # so that memory that is locked is given back
            self._copy = None
        return self._rows


class Block(NamedTuple):
    """Memory of a table: rows, a counter for each, and room for the parts of large values.

    Attributes:
        memory: All of it, in float64.
        rows: How many rows there are.
        parts: How many parts have room.
    """

    memory: Tensor
    rows: int
    parts: int


class _Table:
    """The table of one device.

    # Note [Blocks that stay]
    A table grows by blocks, each twice as large as the one before. A step that needed several ends
    with one that has the room of them all, so the next one grows no more. None is given back: the
    kernel may still write to it from a stream that the allocator knows nothing of.

    # Note [Streams]
    A block is made ready on one stream: it is filled with zeros there, and at the end of a step its
    rows are taken there. Another stream waits for that before its first launch in a step, and the
    rows are taken after the launches of all streams of the step. So no program has to order its
    streams for Kedge, and none waits for another because of a single value.
    """

    def __init__(self, device: torch.device, opened: OpenedDevice, measurer: Any) -> None:
        self._device = device
        self._opened = opened
        self._measurer = measurer
        self._earlier: list[Block] = []
        self._full: list[tuple[Block, int]] = []
        self._streams: list[torch.Stream] = []
        self._block = self._use(_new_block(device, _ROOM, _PARTS), 0)
        self._first = 0

    def grow(self, numbers: int) -> None:
        """Go on in a new block, which has room for a value with so many numbers."""
        used = self._measurer.rows_used(self._device.index)
        block = self._block
        self._full.append((block, used - self._first))
        rows = max(2 * block.rows, block.rows + numbers // ROW_BYTES)
        self._change(_new_block(self._device, rows, 2 * block.parts), used)

    def take_stream(self) -> bool:
        """Let values of the current stream be measured; returns whether they could not be before."""
        if not self._measurer.take_stream(self._device.index):
            return False
        stream = accelerators.current_stream(self._device)
        stream.wait_event(self._ready)
        self._streams.append(stream)
        return True

    def take_rows(self, count: int) -> tuple[int, Tensor]:
        """Return the number of the first of some rows that others write, and these rows."""
        self.take_stream()
        first = self._measurer.take_rows(self._device.index, count)
        if first < 0:
            self.grow(count * ROW_BYTES)
            first = self._measurer.take_rows(self._device.index, count)
        start = first - self._first
        return first, _rows_of(self._block, start + count)[start:]

    def end(self) -> Tensor | None:
        """Return the rows of the step that ends, and begin anew; None if there are none."""
        used = self._measurer.rows_used(self._device.index)
        if not used:
            return None
        current = accelerators.current_stream(self._device)
        for stream in self._streams:
            if stream != current:
                current.wait_stream(stream)
        self._streams.clear()
        filled = [*self._full, (self._block, used - self._first)]
        rows = torch.cat([_rows_of(block, count) for block, count in filled])
        block = self._block
        if self._full:
            block = _new_block(
                self._device,
                sum(block.rows for block, _ in filled),
                sum(block.parts for block, _ in filled),
            )
            self._full.clear()
        self._change(block, 0)
        return rows

    def _change(self, block: Block, first: int) -> None:
        """Go on in a block, whose first row gets this number."""
        if block is not self._block:
            self._earlier.append(self._block)
        self._block = self._use(block, first)
        self._first = first

    def _use(self, block: Block, first: int) -> Block:
        """Have values measured into a block, whose first row gets this number."""
        start = block.memory.data_ptr()
        parts = start + block.rows * ROW_BYTES
        arrived = parts + block.parts * ROW_BYTES
        self._measurer.use_device(
            self._device.index,
            self._opened.place,
            self._opened.tick,
            self._opened.kernels,
            start - first * ROW_BYTES,
            arrived - first * _COUNTER_BYTES,
            parts,
            first,
            first + block.rows,
            block.parts,
        )
        stream = accelerators.current_stream(self._device)
        self._ready = accelerators.mark(stream)
        self._streams.append(stream)
        self._measurer.take_stream(self._device.index)
        return block


def _new_block(device: torch.device, rows: int, parts: int) -> Block:
    counters = -(-rows * _COUNTER_BYTES // ROW_BYTES)
    # A tensor made in inference mode could not be written to outside of it.
    with torch.inference_mode(mode=False):
        memory = torch.zeros(rows + parts + counters, COLUMNS, dtype=torch.float64, device=device)
    return Block(memory, rows, parts)


def _rows_of(block: Block, count: int) -> Tensor:
    return block.memory[:count]


class LaunchedTables:
    """The tables of all devices that the measurer launches on.

    Args:
        measurer: Measures values into them; None without the compiled part.
        departures: Takes them to the host at the end of a step.
    """

    def __init__(self, measurer: Any, departures: Departures) -> None:
        self._measurer = measurer
        self._departures = departures
        self._tables: dict[torch.device, _Table] = {}

    def __bool__(self) -> bool:
        """Whether a value was ever measured on such a device."""
        return bool(self._tables)

    def open(self, device: torch.device) -> bool:
        """Whether a device has become one that the measurer launches on."""
        if self._measurer is None or device in self._tables:
            return False
        # To load a kernel would end a capture with an error.
        if driver.connect(device.type) is None or device_graphs.leaves_alone():
            return False
        opened = driver.open_device(device.type, device.index)
        if opened is None:
            return False
        self._tables[device] = _Table(device, opened, self._measurer)
        return True

    def make_room(self, device: torch.device, numbers: int) -> bool:
        """Make room for one more value with so many numbers; returns whether there is."""
        table = self._tables.get(device)
        if table is None:
            return self.open(device)
        if not table.take_stream():
            table.grow(numbers)
        return True

    def take_rows(self, device: torch.device, count: int) -> tuple[int, Tensor] | None:
        """Return the number of the first of some rows that others write, and these; None without a table."""
        if device not in self._tables and not self.open(device):
            return None
        return self._tables[device].take_rows(count)

    def end(self) -> dict[int, LaunchedTable]:
        """End the step; returns the tables, by the index of the device, which are about to be copied to the host."""
        ended = {}
        for device, table in self._tables.items():
            rows = table.end()
            if rows is not None:
                numbers = rows.view(torch.float32).view(-1)
                ended[device.index] = LaunchedTable(self._departures.add(numbers))
        return ended
