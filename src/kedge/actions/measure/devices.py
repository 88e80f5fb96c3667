"""The measurements of one step on devices: one table for each device."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.actions.measure import reduce
from kedge.actions.measure.saturation import Saturation
from kedge.actions.measure.table import Departures, DeviceTable, Snapshot
from kedge.native import CODES, What, on_device, reductions

_REDUCE = {"full": reduce.full, "norm": reduce.norm, "finite": reduce.finite}


class Measured(NamedTuple):
    """One measurement within a step, before its numbers have come from the device.

    Attributes:
        site: The number of its site.
        size: How many elements the value has.
        device: The device of its row.
        row: The index of its first row.
        rows: How many rows it has; see `kedge.native.on_device.folded`.
        channels: The range of its channels' maxima in the wide numbers.
        drawn: The range of the elements drawn from it in the wide numbers.
        saturation: The saturation of the site's activation; None if it does not saturate.
    """

    site: int
    size: int
    device: torch.device
    row: int
    rows: int = 1
    channels: tuple[int, int] = (0, 0)
    drawn: tuple[int, int] = (0, 0)
    saturation: Saturation | None = None


class DeviceTables:
    """Measures values on their devices, without synchronisation.

    Args:
        departures: Takes the tables to the host.

    Attributes:
        tables: The table of each device that was ever measured on.
        measured: The measurements of the current step.
    """

    def __init__(self, departures: Departures) -> None:
        self._departures = departures
        self.tables: dict[torch.device, DeviceTable] = {}
        self.measured: list[Measured] = []

    def measure(
        self,
        site: int,
        value: Tensor,
        what: What,
        *,
        count: int,
        dim: int | None,
        draws: bool,
        saturation: Saturation | None,
    ) -> Measured:
        """Measure a value.

        Args:
            site: The number of its site.
            value: The value.
            what: The statistics to compute.
            count: The number of its elements.
            dim: The channel dimension; None where channel activity is not tracked.
            draws: Whether to draw elements.
            saturation: The saturation of the site's activation; None if it does not saturate.
        """
        elements = reductions.flat(value)
        table = self._table_on(value.device)
        start = table.begin()
        measured = Measured(site, count, value.device, *_write(elements, table, what))
        if dim is not None:
            measured = measured._replace(channels=table.keep(reduce.channels(value, dim)))
        if draws:
            if saturation is not None:
                deciding = saturation.deciding(value)
                if deciding is not value:
                    elements = reductions.flat(deciding)
            some = reduce.drawn(elements)
            measured = measured._replace(drawn=table.keep(some), saturation=saturation)
        table.end(start)
        self.measured.append(measured)
        return measured

    def _table_on(self, device: torch.device) -> DeviceTable:
        table = self.tables.get(device)
        if table is None:
            table = DeviceTable(device, self._departures)
            self.tables[device] = table
        return table

    def repeat(self, site: int, measured: Measured) -> None:
        """Record at another site a value that this step has already measured."""
        self.measured.append(measured._replace(site=site, channels=(0, 0), saturation=None))

    def put(self, site: int, size: int, squares: Tensor) -> None:
        """Add a known sum of squares, which is on a device, of this many elements."""
        table = self._table_on(squares.device)
        row = table.reserve(1)
        self.measured.append(Measured(site, size, squares.device, row))
        table.slot(row).sumsq.copy_(squares)

    def drop(self, sites: Collection[int]) -> None:
        """Discard the measurements at some sites."""
        self.measured = [m for m in self.measured if m.site not in sites]

    def withdraw(self, site: int) -> None:
        """Discard the last measurement at a site."""
        for place in reversed(range(len(self.measured))):
            if self.measured[place].site == site:
                del self.measured[place]
                return

    def end(self) -> tuple[list[Measured], dict[torch.device, Snapshot]]:
        """End the step.

        Returns:
            Its measurements, and the tables, which are about to be copied to the host.
        """
        measured = self.measured
        self.measured = []
        used = {device: table for device, table in self.tables.items() if table.used}
        return measured, {device: table.take() for device, table in used.items()}


def _write(elements: Tensor, table: DeviceTable, what: What) -> tuple[int, int]:
    """Write the statistics of elements into a table.

    Returns:
        The first row, and the number of rows.
    """
    if table.is_native:
        count = on_device.rows_for(elements.numel())
        row = table.reserve(count)
        if on_device.measure_into(*table.place(row), elements, CODES[what]):
            return row, count
    else:
        row = table.reserve(1)
    _REDUCE[what](elements, table.slot(row))
    return row, 1
