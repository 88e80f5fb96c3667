"""Statistics instead of values: `measure`."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge import native
from kedge.actions import reduce
from kedge.actions.host import HostTable
from kedge.actions.naming import each_operation, kind_meant
from kedge.actions.reduce import STATISTICS
from kedge.actions.saturation import Saturation, saturation
from kedge.actions.statistics import MeasuredSite, Seen, Statistics, course, table_of
from kedge.actions.table import DeviceTable, FinishedStep, Measured, bits
from kedge.errors import NotRecorded, SeveralRecorded
from kedge.flow import Act, Sink
from kedge.native import What, reductions
from kedge.sites.language import single
from kedge.sites.leaves import own_part, untransformed
from kedge.sites.site import Site
from kedge.store.reading.table import tabulate
from kedge.store.rows import FULL, LIGHT, Rows
from kedge.torch_internals import modes
from kedge.torch_internals.tensors import version_of

_REDUCE = {"full": reduce.full, "norm": reduce.norm, "finite": reduce.finite}
Measure = Callable[[Tensor, int], None]
_MEASURED = (native.DONE, native.DONE | native.FRESH)
_ROLES = {"out": native.AS_OUTPUT, "in": native.AS_INPUT}
_BEHIND = 2
_SPOILED_KEPT = 32


class Meter:
    """The action that `measure` returns: reduces values on their device, into one table a step."""

    observes = True

    def __init__(
        self, what: What = "full", *, keep: int | None = 1000, recomputes: bool = False, sink: Sink | None = None
    ) -> None:
        self.what, self.recomputes, self.sink = what, recomputes, sink
        self.level, self.muted, self.keep, self.draws = FULL, False, keep, False
        self.channel_dims: dict[str, int | None] = {}
        self.saturations: dict[str, Saturation] = {}
        self.seats: dict[Site, MeasuredSite] = {}
        self.series: dict[int, list[Mapping[str, Any]]] = {}
        self.step, self._step_level = -1, FULL
        self._what: What = what
        self._code = native.CODES[what]
        self._drawing = False
        self._host = HostTable()
        self._tables: dict[torch.device, DeviceTable] = {}
        self._measured: list[Measured] = []
        self._spoiled: frozenset[int] = frozenset()
        self._spoiled_left = _SPOILED_KEPT
        self.events = self.wires = 0
        self.seconds = self.device_seconds = 0.0
        self._seen: dict[int, Seen] = {}
        self._pending: deque[FinishedStep] = deque()
        self.lock = threading.RLock()

    def __repr__(self) -> str:
        """The call that makes this action."""
        return f"measure({self.what!r})"

    def _repr_html_(self) -> str:
        """The statistics of each site in its newest step, for a notebook."""
        self.finish()
        return table_of([s for seat in list(self.seats.values()) for s in course(seat.site, self._rows(seat.id))[-1:]])

    def bind(self, site: Site) -> Act:
        """Return the function that measures a site's values; if it matches operations, each of them separately."""
        return self._bind(site) if site.op is None else each_operation(site, self._bind)

    def _bind(self, site: Site) -> Act:
        measure = self._measure_at(site)
        return lambda value, event: measure(value, event.step)

    def bind_value(self, site: Site) -> Measure | None:
        """Return the function that measures values without an event; None for operations, which the event identifies."""
        return self._measure_at(site) if site.op is None else None

    def _measure_at(self, site: Site) -> Measure:
        seat: MeasuredSite | None = None
        forward, role, host = not site.is_gradient, _ROLES.get(site.kind, native.AS_VALUE), self._host

        def measure(value: Tensor, step: int) -> None:
            nonlocal seat
            level = self.level
            if not level or (self.muted if forward else level == LIGHT) or modes.is_under_jit():
                return
            start = perf_counter()
            with self.lock:
                if step != self.step:
                    self._begin(step)
                if seat is None:
                    seat = self._observe_first(site, value)
                elif seat.is_special:
                    self._observe(seat, value)
                elif (done := host.observe(value, seat.id, role, self._code, self._drawing)) not in _MEASURED:
                    self._settle(seat, value, done, draws=self._drawing)
            self.events += 1
            self.seconds += perf_counter() - start

        return measure

    def _observe_first(self, site: Site, value: Tensor) -> MeasuredSite:
        """Measure the first value of a site, also inside a transform of `torch.func`."""
        if not reduce.transforms(value):
            seat = self.seat(site, value)
            self._observe(seat, value)
            return seat
        with reduce.plainly():
            inner = untransformed(value)
            seat = self.seat(site, inner)
            self._observe_inner(seat, inner)
        return seat

    def saturates(self, path: str, how: str, numbers: Sequence[float]) -> None:
        """Set how the activation at a path saturates; see `kedge.actions.saturation.saturation`."""
        self.saturations[path] = saturation(how, numbers)
        for seat in self.seats.values():
            if seat.site.path == path:
                self._learn_specials(seat)

    def _learn_specials(self, seat: MeasuredSite) -> None:
        """Determine which extra figures the site needs: saturation, and the activity of channels."""
        known = self.saturations.get(seat.site.path) if seat.site.kind == "out" else None
        if known is not None:
            known = known.rounded(getattr(torch, seat.dtype))
            self._host.saturates(seat.id, known)
        seat.is_special = seat.channels is not None or (known is not None and known.dim is not None)

    def _observe(self, seat: MeasuredSite, value: Tensor, *, inner: bool = False) -> None:
        """Measure a value, and the extra figures that its site needs.

        Args:
            seat: The site.
            value: The value.
            inner: Whether the value is the tensor that a transform wraps, while the transform is suspended.
        """
        competing = self._competing(seat)
        draws = self._drawing and competing is None
        done = self._read(seat, value, draws=draws)
        if done not in _MEASURED:
            done = self._settle(seat, value, done, draws=draws, inner=inner)
        if not done & native.FRESH or self._code:
            return
        if competing is not None and self._drawing:
            self._host.draw_for_last(competing.deciding(value))
        dim = self._tracked_dim(seat, value)
        if dim is not None:
            self._host.activate(_active(value, dim))

    def _read(self, seat: MeasuredSite, value: Tensor, *, draws: bool) -> int:
        """Measure a value by one native call; returns the outcome, as flags of `kedge.native`."""
        role = _ROLES.get(seat.site.kind, native.AS_VALUE)
        return self._host.observe(value, seat.id, role, self._code, draws)

    def _observe_inner(self, seat: MeasuredSite, inner: Tensor) -> None:
        """Measure the tensor that a transform wraps, without channels: `vmap` may put the batch dimension anywhere."""
        seat.channels = None
        self._observe(seat, inner, inner=True)

    def _settle(self, seat: MeasuredSite, value: Tensor, done: int, *, draws: bool, inner: bool = False) -> int:
        """Complete a measurement that one native call could not; returns the outcome, as flags of `kedge.native`."""
        host = self._host
        while done == native.NO_ROOM:
            host.make_room(1)
            done = self._read(seat, value, draws=draws)
        if done & native.NEW_SOURCE and host.measurer is not None:
            self._came(seat, host.measurer.source)
        if done == native.REFUSED:
            if inner or not reduce.transforms(value):
                self._observe_slowly(seat, value)
                return done
            with reduce.plainly():
                self._observe_inner(seat, untransformed(value))
        return done

    def _observe_slowly(self, seat: MeasuredSite, value: Tensor) -> None:
        """Measure a value with PyTorch's reductions, unless this step has already measured this very tensor."""
        version = version_of(value)
        seen = self._seen.get(id(value))
        if seen is not None and seen[0]() is value and seen[1] == version >= 0:
            self._again(seat, seen)
            return
        local = own_part(value)
        if not reduce.measurable(local):
            if self.level == LIGHT:
                return
            place: Measured | int = self._pass_over(seat, local)
        elif local.device.type != "cpu":
            place = self._measure_there(seat, local, self._what)
        else:
            place = self._measure_here(seat, local)
        self._seen[id(value)] = weakref.ref(value), version, place, seat.id if seat.site.kind == "out" else None
        self._came(seat, None)

    def _measure_here(self, seat: MeasuredSite, value: Tensor) -> int:
        """Measure a CPU value that a single native call could not; returns its row."""
        host, found = self._host, native.row(value, self._what)
        deciding = self._saturation(seat, value)[1] if self._drawing else None
        row = host.make_room(1)
        host.rows[row] = found
        host.take(seat.id, deciding)
        dim = None if self._code else self._tracked_dim(seat, value)
        if dim is not None:
            host.activate(_active(value, dim))
        return row

    def observe_all(self, seats: Sequence[MeasuredSite], values: Sequence[Tensor], step: int) -> None:
        """Measure one value for each of many sites that belong to no module, by one native call where possible."""
        with self.lock:
            if step != self.step:
                self._begin(step)
            for i in self._host.observe_all([seat.id for seat in seats], values, self._code, draws=self._drawing):
                self._observe(seats[i], values[i].detach())

    def _again(self, seat: MeasuredSite, seen: Seen) -> None:
        """Record at another site a value that this step has already measured."""
        _, _, place, source = seen
        if isinstance(place, int):
            self._host.make_room(1)
            self._host.place(seat.id, place)
        else:
            self._measured.append(place._replace(site=seat.id, channels=(0, 0), saturation=None))
        self._came(seat, source)

    def _came(self, seat: MeasuredSite, source: int | None) -> None:
        """Record the site whose output an input is; None if it is no site's output."""
        if source not in seat.sources and seat.site.kind == "in":
            seat.sources = (*seat.sources, source)
            self.wires += 1

    def _begin(self, step: int) -> None:
        if self.step >= 0 or self._pending:  # values of another step are left
            self.flush()
        self.step, self._step_level = step, self.level
        self._what = "norm" if self.level == LIGHT else self.what
        self._code = native.CODES[self._what]
        self._drawing = self.draws and not self._code

    def seat(self, site: Site, value: Tensor) -> MeasuredSite:
        """Return a site's entry, made from its first value."""
        known = self.seats.get(site)
        if known is not None:
            return known
        dim = self._channel_dim(site, value)
        node = value.grad_fn.name() if value.grad_fn is not None else None
        dtype = str(value.dtype).removeprefix("torch.")
        shape, channels = () if value.is_nested else tuple(value.shape), None if dim is None else value.shape[dim]
        seat = MeasuredSite(site, len(self.seats), shape, dtype, channels, (), node)
        self.seats[site] = seat
        self._learn_specials(seat)
        return seat

    def _channel_dim(self, site: Site, value: Tensor) -> int | None:
        if site.kind != "out" or site.path not in self.channel_dims or value.dim() < 2:
            return None
        return 1 if value.dim() != 3 else self.channel_dims[site.path]

    def _measure_there(self, seat: MeasuredSite, value: Tensor, what: What) -> Measured:
        """Measure a value on its device, without synchronisation."""
        elements, table = reductions.flat(value), self._table_on(value.device)
        measured = Measured(seat.id, elements.numel(), value.device, table.used)
        start = table.now()
        _REDUCE[what](elements, table.slot())
        if what == "full":
            dim = self._tracked_dim(seat, value)
            if dim is not None:
                measured = measured._replace(channels=_keep(reduce.channels(value, dim), table))
            if self.draws:
                saturation, deciding = self._saturation(seat, value)
                some = reduce.drawn(elements if deciding is value else reductions.flat(deciding))
                measured = measured._replace(drawn=_keep(some, table), saturation=saturation)
        if start is not None:
            table.spans.append((start, table.now()))
        self._measured.append(measured)
        return measured

    def _tracked_dim(self, seat: MeasuredSite, value: Tensor) -> int | None:
        """The channel dimension of a value; None where channel activity is not tracked."""
        dim = self._channel_dim(seat.site, value)
        return dim if dim is not None and seat.channels == value.shape[dim] else None

    def _competing(self, seat: MeasuredSite) -> Saturation | None:
        """The saturation of an activation where only its largest outputs decide; None where all outputs do."""
        known = self._host.saturating.get(seat.id) if seat.is_special else None
        return None if known is None or known.dim is None else known

    def _saturation(self, seat: MeasuredSite, value: Tensor) -> tuple[Saturation | None, Tensor]:
        """The site's saturation, and the outputs that decide; None and the value itself if it does not saturate."""
        known = self._host.saturating.get(seat.id)
        return known, value if known is None else known.deciding(value)

    def _pass_over(self, seat: MeasuredSite, value: Tensor) -> int:
        """Record an unmeasurable value; for integers and booleans also their number, and that all are finite."""
        whole = not (value.is_floating_point() or value.is_complex() or value.is_nested)
        host = self._host
        row = host.make_room(1)
        host.rows[row, STATISTICS.index("nonfinite") :] = 0, value.numel() if whole else 0
        host.take(seat.id)
        return row

    def _table_on(self, device: torch.device) -> DeviceTable:
        table = self._tables.get(device)
        if table is None:
            table = self._tables[device] = DeviceTable(device)
        return table

    def total_seat(self, site: Site, size: int) -> MeasuredSite:
        """Return the entry of a site that stands for many tensors with `size` elements in all."""
        seat = self.seats.get(site)
        if seat is None:
            seat = self.seats[site] = MeasuredSite(site, len(self.seats), (size,), "float32", None, (), None)
        return seat

    def add_squares(
        self, seats: Sequence[MeasuredSite], step: int, counts: Sequence[int], squares: Sequence[float]
    ) -> None:
        """Add known sums of squares, one a site.

        Args:
            seats: The sites.
            step: The step.
            counts: How many numbers each sum is of.
            squares: The sums.
        """
        with self.lock:
            if step != self.step:
                self._begin(step)
            self._host.put([seat.id for seat in seats], counts, squares)

    def spoiled(self) -> bool:
        """Whether this step has non-finite values; true on a GPU if it has any values, because reading them would wait."""
        if not (self._host.used or self._measured):
            return False
        if self._tables:
            return True
        return self._host.spoiled()

    def drop(self, seats: Sequence[MeasuredSite] | None = None) -> None:
        """Discard this step's measurements, at some sites or at all."""
        with self.lock:
            if seats is None:
                self._seen.clear()
                self._host.end()
                for table in self._tables.values():
                    table.take()
                self._measured = []
                return
            ids = {seat.id for seat in seats}
            self._host.drop(ids)
            self._measured = [m for m in self._measured if m.site not in ids]

    def flush(self, *, finite: bool = False) -> None:
        """End the step: start copying its tables to the host, and pass on those that have arrived.

        Args:
            finite: Whether all was finite in a step without measurements, so that non-finite values later are news.
        """
        with self.lock, reduce.plainly():
            self._seen.clear()
            if self._host.used or self._measured:
                there = {d: t.take() for d, t in self._tables.items() if t.used}
                self._pending.append(FinishedStep(self.step, self._step_level, self._measured, there, self._host.end()))
                self._measured = []
            elif finite and not self._pending:
                self._spoiled = frozenset()
            self.step = -1  # later values, even of the same step, are measured at the level in force then
            while self._pending and (self._pending[0].ready() or len(self._pending) > _BEHIND):
                self._emit(self._pending.popleft())

    def finish(self) -> None:
        """Pass everything on, waiting for the copies still in progress."""
        with self.lock:
            self.flush()
            while self._pending:
                self._emit(self._pending.popleft())

    def _emit(self, step: FinishedStep) -> None:
        self.device_seconds += sum(snapshot.seconds() for snapshot in step.snapshots.values())
        if step.level == FULL or self._is_news(step):
            self._pass_on(step.number, step.columns())

    def _pass_on(self, number: int, columns: dict[str, Any]) -> None:
        if not len(columns["site"]):
            return
        if self.sink is not None:
            self.sink.stats(number, columns)
        else:
            self.series.setdefault(number, []).append({"step": number, **columns})
            while self.keep is not None and len(self.series) > self.keep:
                del self.series[next(iter(self.series))]

    def _is_news(self, step: FinishedStep) -> bool:
        """Whether a site that was finite at the last check has non-finite values in this light step.

        So a module whose output is infinite in every step does not hide later failures.
        """
        spoiled, known = step.spoiled(), self._spoiled
        self._spoiled = spoiled
        news = bool(spoiled - known) and self._spoiled_left > 0
        self._spoiled_left -= news
        return news

    def read(self, name: str, why: Callable[[str], str]) -> Statistics:
        """Return the statistics of a site in its newest step."""
        found: list[Statistics] = self.records(name)
        if not found:
            raise NotRecorded(f'nothing was measured under "{name}": {why(name)}')
        return found[-1]

    def records(self, name: str) -> list[Any]:
        """Return the statistics of a site, one a step."""
        self.finish()
        found = self._named(name)
        if len(found) > 1:
            names = ", ".join(f'"{seat.site}"' for seat in found)
            raise SeveralRecorded(f'"{name}" stands for {len(found)} measured sites; read one of {names}')
        return course(found[0].site, self._rows(found[0].id)) if found else []

    def _named(self, name: str) -> list[MeasuredSite]:
        term = single(name)
        seats = [s for s in self.seats.values() if term.names(s.site)]
        kind = kind_meant(term, {s.site.kind for s in seats})
        seats = [s for s in seats if s.site.kind == kind and term.leaf in (None, s.site.leaf)]
        return [s for s in seats if term.call in (None, s.site.call)]

    def _rows(self, site: int) -> Rows:
        names = ("site", "count", *STATISTICS, "sampled", "saturated", "exponents")
        parts = [part for parts in self.series.values() for part in parts]
        rows = ((part, i) for part in parts for i in np.flatnonzero(part["site"] == site))
        return tabulate({"step": part["step"], **{n: part[n][i] for n in names}} for part, i in rows).rows(site)


def _active(value: Tensor, dim: int) -> bytes:
    """One bit for each channel of a CPU value: whether any of its numbers is above zero."""
    found = native.channels_above_zero(value, dim)
    return bits(reduce.channels(value, dim).float().numpy()) if found is None else found


def _keep(numbers: Tensor, table: DeviceTable) -> tuple[int, int]:
    """Copy numbers into a table; returns the range that they occupy."""
    start = table.wide_used
    table.room(numbers.numel()).copy_(numbers)
    return start, table.wide_used


def measure(what: What = "full", *, keep: int | None = 1000, recomputes: bool = False) -> Meter:
    """Return the action that measures: one row of statistics a site and step, without synchronisation.

    Several calls and passes of one step are merged. ``stats["layer4"].rms`` reads the newest step,
    ``stats.records("layer4")`` all steps.

    Args:
        what: "full" for count, sum, sum of squares, min, max, non-zero and non-finite elements; "norm" for
            the sum of squares; "finite" for the sum, which is finite if every element is.
        keep: How many of the last steps to keep; None for all.
        recomputes: Whether to measure the values of a checkpoint's recompute, too.
    """
    if what not in _REDUCE:
        raise ValueError(f"measure({what!r}): it is one of {', '.join(map(repr, _REDUCE))}")
    if keep is not None and keep < 1:
        raise ValueError(f"measure(keep={keep}) would keep nothing; use 1 or more, or None for all")
    return Meter(what, keep=keep, recomputes=recomputes)
