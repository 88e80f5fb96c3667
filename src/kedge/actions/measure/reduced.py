"""Measures the values that a single native call cannot.

These are on devices whose driver does not launch the kernel, of unusual layouts or types, or come to
a Kedge without the compiled part.
"""

from __future__ import annotations

import math
import weakref
from typing import TypeAlias

import torch
from torch import Tensor

from kedge import native
from kedge.actions.measure import reduce
from kedge.actions.measure.devices import DeviceTables, Measured
from kedge.actions.measure.host import HostTable
from kedge.actions.measure.reduce import STATISTICS
from kedge.actions.measure.site_table import MeasuredSite, SiteTable, role_of
from kedge.actions.measure.table import Departures, Snapshot
from kedge.native import What
from kedge.sites.leaves import Numbers, numbers_of, own_part
from kedge.sites.spread import spread_of
from kedge.store.rows import LIGHT
from kedge.torch_internals import device_graphs
from kedge.torch_internals.tensors import version_of

_Seen: TypeAlias = tuple[weakref.ref[Tensor], int, Measured | int, int | None]
"""A tensor measured in this step, so that it is not measured twice.

It has the tensor, its version, its measurement (on the host the row), and the number of the site
whose output it is, None without one.
"""


class ReducedValues:
    """Measures values with PyTorch's reductions, each tensor once a step.

    Args:
        sites: Receives which site's output each input is.
        host: Receives the rows of values in this process's memory.
        departures: Takes the rows of values on devices to the host.

    Attributes:
        devices: The rows of values on devices.
    """

    def __init__(
        self,
        sites: SiteTable,
        host: HostTable,
        departures: Departures,
    ) -> None:
        self.devices = DeviceTables(departures)
        self._sites = sites
        self._host = host
        self._seen: dict[int, _Seen] = {}

    def forget(self) -> None:
        """Forget which tensors this step has measured."""
        self._seen.clear()

    def observe(
        self, seat: MeasuredSite, value: Tensor, what: What, *, level: int, draws: bool
    ) -> None:
        """Measure a value, unless this step has already measured this very tensor.

        Args:
            seat: The site.
            value: The value.
            what: The statistics to compute.
            level: The level of the step: a light one has no rows for values that cannot be
                measured.
            draws: Whether to draw elements.
        """
        if not value.is_cpu and device_graphs.leaves_alone():
            return
        version = version_of(value)
        seen = self._seen.get(id(value))
        if seen is not None and seen[0]() is value and seen[1] == version >= 0:
            self._repeat(seat, seen[2], seen[3])
            return

        spread = spread_of(value)
        local = own_part(value)
        numbers = numbers_of(local)
        place: Measured | int
        if spread is not None and spread.partial:
            if numbers is None:
                return
            bad = _bad_addends(numbers.stored)
            if bad is None or (level == LIGHT and not any(bad)):
                return
            place = self._pass_over(seat, value.numel(), *bad)
        elif numbers is None or not reduce.measurable(numbers.stored):
            if level == LIGHT:
                return
            place = self._pass_over(seat, *_known_of(numbers))
        else:
            place = self._measure(seat, local, numbers, what, draws=draws)

        source = None
        if seat.site.kind == "out":
            source = seat.id
        # What outlives its call gets no weak reference: a parameter or its gradient, which the
        # program may swap, and PyTorch refuses that then.
        if role_of(seat.site) != native.AS_LASTING and not (value.is_leaf and value.requires_grad):
            self._seen[id(value)] = weakref.ref(value), version, place, source
        self._sites.connect(seat, None)

    def _measure(
        self,
        seat: MeasuredSite,
        value: Tensor,
        numbers: Numbers,
        what: What,
        *,
        draws: bool,
    ) -> Measured | int:
        """Measure a value where it is; returns its measurement, on the host its row."""
        host = self._host
        stored = numbers.stored
        dim = None
        if what == "full" and value.layout is torch.strided and not value.is_nested:
            dim = self._sites.tracked_dim(seat, value)
        saturation = None
        if draws:
            saturation = host.saturating.get(seat.id)
        count = stored.numel() + numbers.zeros
        if stored.is_complex():
            count *= 2
        if numbers.zeros:  # one stands for all of them
            stored = torch.cat([stored.reshape(-1), stored.new_zeros(1)])
        if stored.device.type != "cpu":
            return self.devices.measure(
                seat.id,
                stored,
                what,
                count=count,
                dim=dim,
                draws=draws,
                saturation=saturation,
            )

        found = native.row(stored, what)
        row = host.make_room(1)
        host.rows[row] = found
        host.rows[row, len(STATISTICS)] = count
        host.take(seat.id)
        if draws:
            deciding = stored
            if saturation is not None:
                deciding = saturation.deciding(stored)
            host.draw_for_last(deciding)
        if dim is not None:
            host.activate(stored, dim)
        return row

    def _repeat(
        self,
        seat: MeasuredSite,
        place: Measured | int,
        source: int | None,
    ) -> None:
        """Record at another site a value that this step has already measured."""
        if isinstance(place, int):
            self._host.make_room(1)
            self._host.place(seat.id, place)
        else:
            self.devices.repeat(seat.id, place)
        self._sites.connect(seat, source)

    def end(self) -> tuple[list[Measured], dict[torch.device, Snapshot]]:
        """End the step.

        Returns:
            Its measurements on devices, and the tables, which are about to be copied to the host.
        """
        self._seen.clear()
        if not self.devices.tables:
            return [], {}
        return self.devices.end()

    def _pass_over(
        self,
        seat: MeasuredSite,
        count: int,
        nonfinite: float,
        nan: float,
    ) -> int:
        """Record a value without statistics.

        It has the number of its elements, and of non-finite ones and NaN, which are NaN if not
        known.
        """
        host = self._host
        row = host.make_room(1)
        host.rows[row, STATISTICS.index("nonfinite") :] = nonfinite, nan, count
        host.take(seat.id)
        return row


def _known_of(numbers: Numbers | None) -> tuple[int, float, float]:
    """Return how many elements of a value without statistics are known.

    With them come the numbers of those that are not finite, and that are NaN.
    """
    if numbers is None:
        return 0, math.nan, math.nan
    stored = numbers.stored
    if not stored.is_floating_point() and not stored.is_complex():
        return stored.numel() + numbers.zeros, 0, 0
    if stored.numel():
        return 0, math.nan, math.nan
    return 0, 0, 0


def _bad_addends(value: Tensor) -> tuple[int, int] | None:
    """Return how many of a partial value's addends are not finite, and how many are NaN.

    Each of them spoils its sum. None is returned on a device.
    """
    if value.device.type != "cpu":
        return None
    if not reduce.measurable(value):
        return 0, 0
    addends = value.detach()
    return int((~torch.isfinite(addends)).sum()), int(torch.isnan(addends).sum())
