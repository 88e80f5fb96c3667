"""Measures the values that a single native call cannot: on devices, of unusual layouts, without the compiled part."""

from __future__ import annotations

import weakref
from typing import TypeAlias

import torch
from torch import Tensor

from kedge import native
from kedge.actions.measure import reduce
from kedge.actions.measure.devices import DeviceTables, Measured
from kedge.actions.measure.host import HostTable
from kedge.actions.measure.reduce import STATISTICS
from kedge.actions.measure.site_table import MeasuredSite, SiteTable
from kedge.actions.measure.table import Departures, Snapshot
from kedge.native import What
from kedge.sites.leaves import dequantized, own_part
from kedge.sites.spread import spread_of
from kedge.store.rows import LIGHT
from kedge.torch_internals.tensors import version_of

_Seen: TypeAlias = tuple[weakref.ref[Tensor], int, Measured | int, int | None]
"""A tensor measured in this step, so that it is not measured twice: the tensor, its version, its measurement (on the
host the row), and the number of the site whose output it is, None without one."""


class ReducedValues:
    """Measures values with PyTorch's reductions, each tensor once a step.

    Args:
        sites: Receives which site's output each input is.
        host: Receives the rows of values in this process's memory.
        departures: Takes the rows of values on devices to the host.

    Attributes:
        devices: The rows of values on devices.
    """

    def __init__(self, sites: SiteTable, host: HostTable, departures: Departures) -> None:
        self.devices = DeviceTables(departures)
        self._sites, self._host = sites, host
        self._seen: dict[int, _Seen] = {}

    def forget(self) -> None:
        """Forget which tensors this step has measured."""
        self._seen.clear()

    def observe(self, seat: MeasuredSite, value: Tensor, what: What, *, level: int, draws: bool) -> None:
        """Measure a value, unless this step has already measured this very tensor.

        Args:
            seat: The site.
            value: The value.
            what: The statistics to compute.
            level: The level of the step: a light one has no rows for values that cannot be measured.
            draws: Whether to draw elements.
        """
        version = version_of(value)
        seen = self._seen.get(id(value))
        if seen is not None and seen[0]() is value and seen[1] == version >= 0:
            self._repeat(seat, seen[2], seen[3])
            return
        spread, local = spread_of(value), dequantized(own_part(value))
        if spread is not None and spread.partial:
            if (bad := _bad_addends(local)) is None or (level == LIGHT and not any(bad)):
                return
            place: Measured | int = self._pass_over(seat, value.numel(), *bad)
        elif not reduce.measurable(local):
            if level == LIGHT:
                return
            whole = not (local.is_floating_point() or local.is_complex() or local.is_nested)
            place = self._pass_over(seat, local.numel() if whole else 0)
        else:
            place = self._measure(seat, local, what, draws=draws)
        source = seat.id if seat.site.kind == "out" else None
        self._seen[id(value)] = weakref.ref(value), version, place, source
        self._sites.connect(seat, None)

    def _measure(self, seat: MeasuredSite, value: Tensor, what: What, *, draws: bool) -> Measured | int:
        """Measure a value where it is; returns its measurement, on the host its row."""
        dim = self._sites.tracked_dim(seat, value) if what == "full" else None
        saturation = self._host.saturating.get(seat.id) if draws else None
        if value.device.type != "cpu":
            return self.devices.measure(seat.id, value, what, dim=dim, draws=draws, saturation=saturation)
        host, found = self._host, native.row(value, what)
        row = host.make_room(1)
        host.rows[row] = found
        host.take(seat.id)
        if draws:
            host.draw_for_last(value if saturation is None else saturation.deciding(value))
        if dim is not None:
            host.activate(value, dim)
        return row

    def _repeat(self, seat: MeasuredSite, place: Measured | int, source: int | None) -> None:
        """Record at another site a value that this step has already measured."""
        if isinstance(place, int):
            self._host.make_room(1)
            self._host.place(seat.id, place)
        else:
            self.devices.repeat(seat.id, place)
        self._sites.connect(seat, source)

    def end(self) -> tuple[list[Measured], dict[torch.device, Snapshot]]:
        """End the step; returns its measurements on devices, and the tables, which are about to be copied to the host."""
        self._seen.clear()
        return self.devices.end() if self.devices.tables else ([], {})

    def _pass_over(self, seat: MeasuredSite, count: int, nonfinite: int = 0, nan: int = 0) -> int:
        """Record a value without statistics but the numbers of its elements, 0 if it is not known, and of bad ones."""
        host = self._host
        row = host.make_room(1)
        host.rows[row, STATISTICS.index("nonfinite") :] = nonfinite, nan, count
        host.take(seat.id)
        return row


def _bad_addends(value: Tensor) -> tuple[int, int] | None:
    """Return how many of a partial value's addends are not finite, each of which spoils its sum, and how many are NaN.

    None on a device.
    """
    if value.device.type != "cpu":
        return None
    if not reduce.measurable(value):
        return 0, 0
    return int((~torch.isfinite(value.detach())).sum()), int(torch.isnan(value.detach()).sum())
