"""The values of the current step, measured by one native call each or by PyTorch's reductions."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kedge import native
from kedge.actions.measure import reduce
from kedge.actions.measure.finished import FinishedStep
from kedge.actions.measure.host import HostTable
from kedge.actions.measure.launched import SECONDS, LaunchedTables
from kedge.actions.measure.reduced import ReducedValues
from kedge.actions.measure.saturation import Saturation
from kedge.actions.measure.site_table import MeasuredSite, SiteTable, role_of
from kedge.actions.measure.table import Departures
from kedge.native import What
from kedge.sites.leaves import untransformed
from kedge.sites.site import Site
from kedge.store.rows import FULL
from kedge.torch_internals import device_graphs

_SQUARES = reduce.STATISTICS.index("sumsq")
MEASURED = (native.DONE, native.DONE | native.FRESH)
"""The outcomes of native calls that measured a value completely."""


class StepValues:
    """Measures the values of one step after another.

    Args:
        sites: The entries of the sites.
        host: The rows of values in this process's memory.
        departures: Takes the rows of values on devices to the host.

    Attributes:
        step: The number of the step; -1 between steps.
        code: The statistics to compute, as a code of `kedge.native.CODES`; 0 stands for all.
        draws: Whether elements are drawn from each value.
    """

    def __init__(
        self,
        sites: SiteTable,
        host: HostTable,
        departures: Departures,
    ) -> None:
        self.host = host
        self.step = -1
        self.code = native.CODES["full"]
        self.draws = False
        self._what: What = "full"
        self._level = FULL
        self._sites = sites
        self._launched = LaunchedTables(host.measurer, departures)
        self._reduced = ReducedValues(sites, host, departures)

    def begin(self, step: int, what: What, *, level: int, draws: bool) -> None:
        """Begin a step.

        Args:
            step: Its number.
            what: The statistics to compute.
            level: The level at which it is measured.
            draws: Whether elements are drawn where all statistics are computed.
        """
        self.step = step
        self._what = what
        self._level = level
        self.code = native.CODES[what]
        self.draws = draws and not self.code

    def observe_first(self, site: Site, value: Tensor) -> MeasuredSite:
        """Measure the first value of a site, also inside a transform of `torch.func`."""
        if not reduce.transforms(value):
            seat = self._sites.seat(site, value)
            self.observe(seat, value)
            return seat
        with reduce.plainly():
            inner = untransformed(value)
            seat = self._sites.seat(site, inner)
            self._observe_inner(seat, inner)
        return seat

    def observe(
        self,
        seat: MeasuredSite,
        value: Tensor,
        *,
        inner: bool = False,
    ) -> None:
        """Measure a value, and the extra figures that its site needs.

        Args:
            seat: The site.
            value: The value.
            inner: Whether the value is the tensor that a transform wraps, while the transform is
                suspended.
        """
        competing = self._competing(seat)
        draws = self.draws and competing is None
        dim = None
        if seat.channels is not None and not self.code:
            dim = self._sites.tracked_dim(seat, value)
        done = self._read(seat, value, draws=draws, dim=dim)
        if done not in MEASURED:
            done = self.settle(seat, value, done, draws=draws, dim=dim, inner=inner)
        if not done & native.FRESH or self.code:
            return
        if competing is not None and self.draws:
            self._draw_for_last(competing.deciding(value))
        if dim is not None and value.is_cpu:
            self.host.activate(value, dim)

    def _draw_for_last(self, deciding: Tensor) -> None:
        """Draw elements for the last measurement, from the outputs that decide."""
        done = self.host.draw_for_last(deciding)
        if done == native.NO_TABLE and self._launched.make_room(deciding.device, deciding.numel()):
            self.host.draw_for_last(deciding)

    def _competing(self, seat: MeasuredSite) -> Saturation | None:
        """Return the saturation of an activation where only its largest outputs decide."""
        if not seat.is_special:
            return None
        known = self.host.saturating.get(seat.id)
        if known is None or known.dim is None:
            return None
        return known

    def _read(
        self, seat: MeasuredSite, value: Tensor, *, draws: bool, dim: int | None = None
    ) -> int:
        """Measure a value by one native call; returns the outcome, as flags of `kedge.native`."""
        role = role_of(seat.site)
        if dim is None:
            return self.host.observe(value, seat.id, role, self.code, draws)
        return self.host.observe(value, seat.id, role, self.code, draws, dim)

    def _observe_inner(self, seat: MeasuredSite, inner: Tensor) -> None:
        """Measure the tensor that a transform wraps, without channels.

        `vmap` may put the batch dimension anywhere.
        """
        seat.channels = None
        self.observe(seat, inner, inner=True)

    def settle(
        self,
        seat: MeasuredSite,
        value: Tensor,
        done: int,
        *,
        draws: bool,
        dim: int | None = None,
        inner: bool = False,
    ) -> int:
        """Complete a measurement that one native call could not.

        Args:
            seat: The site.
            value: The value.
            done: The outcome of the native call.
            draws: Whether it was to draw elements.
            dim: The dimension of its channels, where their activity is tracked.
            inner: Whether the value is the tensor that a transform wraps, while the transform is
                suspended.

        Returns:
            The outcome, as flags of `kedge.native`.
        """
        host = self.host
        if done == native.REFUSED and not value.is_cpu and self._launched.open(value.device):
            done = self._read(seat, value, draws=draws, dim=dim)
        while done in (native.NO_ROOM, native.NO_TABLE):
            if done == native.NO_ROOM:
                host.make_room(1)
            elif not self._launched.make_room(value.device, value.numel()):
                done = native.REFUSED
                break
            done = self._read(seat, value, draws=draws, dim=dim)
        if done == native.CAPTURED:
            device_graphs.leaves_alone()
            return done
        if done & native.NEW_SOURCE and host.measurer is not None:
            self._sites.connect(seat, host.measurer.source)
        if done == native.REFUSED:
            if inner or not reduce.transforms(value):
                self._reduced.observe(seat, value, self._what, level=self._level, draws=self.draws)
                return done
            with reduce.plainly():
                self._observe_inner(seat, untransformed(value))
        return done

    def observe_all(
        self,
        seats: Sequence[MeasuredSite],
        values: Sequence[Tensor],
    ) -> None:
        """Measure one value for each of many sites that belong to no module.

        That is one native call where possible.
        """
        ids = [seat.id for seat in seats]
        for i in self.host.observe_all(ids, values, self.code, draws=self.draws):
            self.observe(seats[i], values[i].detach())

    def add_squares(
        self,
        seats: Sequence[MeasuredSite],
        counts: Sequence[int],
        squares: Sequence[float | Tensor],
    ) -> None:
        """Add known sums of squares, one a site; those that are on a device stay there."""
        here: list[tuple[int, int, float]] = []
        on_devices: dict[torch.device, list[tuple[int, int, Tensor]]] = {}
        for seat, count, known in zip(seats, counts, squares, strict=True):
            if isinstance(known, Tensor):
                on_devices.setdefault(known.device, []).append((seat.id, count, known))
            else:
                here.append((seat.id, count, known))
        if here:
            self.host.put(*zip(*here, strict=True))
        for device, known_there in on_devices.items():
            self._put_on(device, known_there)

    def _put_on(self, device: torch.device, known: Sequence[tuple[int, int, Tensor]]) -> None:
        """Add sums of squares that are on a device, each with its site and number of elements."""
        taken = self._launched.take_rows(device, len(known))
        if taken is None:
            for site, count, squares in known:
                self._reduced.devices.put(site, count, squares)
            return
        first, rows = taken
        rows.fill_(math.nan)
        rows[:, SECONDS] = 0
        rows[:, _SQUARES] = torch.stack([squares.reshape(()) for _, _, squares in known])
        for row, (site, count, _) in enumerate(known, first):
            self.host.put_launched(site, count, device.index, row)

    def spoiled(self) -> bool:
        """Whether the step has non-finite values.

        It is true on a GPU if the step has any values, because reading them would wait.
        """
        if not (self.host.used or self._reduced.devices.measured):
            return False
        return bool(self._launched or self._reduced.devices.tables) or self.host.spoiled()

    def drop(self, sites: Collection[int] | None = None) -> None:
        """Discard the measurements at some sites, or all."""
        if sites is not None:
            self.host.drop(sites)
            self._reduced.devices.drop(sites)
            return
        self._reduced.end()
        self._launched.end()
        self.host.end()

    def withdraw(self, site: int) -> None:
        """Discard the last measurement at a site."""
        self.host.withdraw(site)
        self._reduced.devices.withdraw(site)

    def end(self) -> FinishedStep | None:
        """End the step, and have its tables copied to the host; None if it has no measurements."""
        step = self.step
        # Later values, even of the same step, are measured at the level in force then.
        self.step = -1
        if not (self.host.used or self._reduced.devices.measured):
            self._reduced.forget()
            return None
        measured, snapshots = self._reduced.end()
        host = self.host.end()
        return FinishedStep(step, self._level, measured, snapshots, host, self._launched.end())
