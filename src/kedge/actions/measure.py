"""Statistics instead of values: `measure`."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kedge.actions import reduce
from kedge.actions.naming import each_operation, kind_meant, single
from kedge.actions.saturation import Saturation, saturation
from kedge.actions.statistics import Seat, Seen, Statistics, course, table_of
from kedge.actions.table import FIELDS, Bulk, DeviceTable, Measured, Parts, Step, to_host
from kedge.errors import NotRecorded, SeveralRecorded
from kedge.flow import Act, Event, Sink, version_of
from kedge.sites.leaves import own_part, untransformed
from kedge.sites.site import Site
from kedge.store.rows import FULL, LIGHT, Rows
from kedge.store.table import tabulate
from kedge.torch_internals import kernels, modes

What = Literal["full", "norm", "finite"]
_REDUCE = {"full": reduce.full, "norm": reduce.norm, "finite": reduce.finite}
_HOST = torch.device("cpu")
_BEHIND = 2
_SPOILED_KEPT = 32
_RECENT = 16
"""How many light steps are kept, to be written when something is not finite: what led up to it."""


class Meter:
    """The action that `measure` makes: sums values up on their device, one table a step."""

    observes = True

    def __init__(
        self, what: What = "full", *, keep: int | None = 1000, recomputes: bool = False, sink: Sink | None = None
    ) -> None:
        self.what, self.recomputes, self.sink = what, recomputes, sink
        self.level, self.muted, self.keep, self.draws = FULL, False, keep, False
        self.channel_dims: dict[str, int | None] = {}
        self.saturations: dict[str, Saturation] = {}
        self.curves: set[int] = set()
        self.seats: dict[Site, Seat] = {}
        self.series: dict[int, list[Mapping[str, Any]]] = {}
        self.step, self._step_level = -1, FULL
        self._tables: dict[torch.device, DeviceTable] = {}
        self._measured: list[Measured] = []
        self._bulk: list[Bulk] = []
        self._spoiled: frozenset[int] = frozenset()
        self._spoiled_left = _SPOILED_KEPT
        self._recent: deque[Step] = deque(maxlen=_RECENT)
        self.events = 0
        self.seconds = self.device_seconds = 0.0
        self._seen: dict[int, Seen] = {}
        self._pending: deque[Step] = deque()
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        """As one would write it."""
        return f"measure({self.what!r})"

    def _repr_html_(self) -> str:
        """The statistics of each site in its newest step, for a notebook."""
        self.finish()
        return table_of([s for seat in list(self.seats.values()) for s in course(seat.site, self._rows(seat.id))[-1:]])

    def bind(self, site: Site) -> Act:
        """Return what measures the values of one site; of operations, each by itself."""
        return self._bind(site) if site.op is None else each_operation(site, self._bind)

    def _bind(self, site: Site) -> Act:
        seat: Seat | None = None
        forward = not site.is_gradient

        def observe(value: Tensor, event: Event) -> None:
            nonlocal seat
            passed_over = self.muted if forward else self.level == LIGHT
            if not self.level or passed_over or modes.is_under_jit():
                return
            start = time.perf_counter()
            with self._lock:
                if reduce.transforms(value):
                    seat = self._observe_whole(site, value, event.step)
                else:
                    seat = seat or self._seat(site, value)
                    self.observe(seat, value, event.step)
            self.events += 1
            self.seconds += time.perf_counter() - start

        return observe

    def _observe_whole(self, site: Site, value: Tensor, step: int) -> Seat:
        with reduce.plainly():
            inner = untransformed(value)
            seat = self._seat(site, inner)
            seat.channels = None  # under `vmap` the samples' dimension may be anywhere
            self.observe(seat, inner, step)
        return seat

    def saturates(self, path: str, how: str, numbers: Sequence[float]) -> None:
        """Tell how the activation at a path saturates; see `kedge.actions.saturation.saturation`."""
        self.saturations[path] = saturation(how, numbers)

    def observe(self, seat: Seat, value: Tensor, step: int) -> None:
        """Measure a value, unless this very tensor was measured in this step already."""
        site = seat.site
        if step != self.step:
            self._begin(step)
        if self.level == LIGHT and not reduce.measurable(value):
            return
        what = "norm" if self.level == LIGHT else self.what
        seen = self._seen.get(id(value))
        if seen is not None and seen.serves(value, what):
            self._measured.append(seen.measured._replace(site=seat.id, channels=(0, 0), saturation=None))
            source = seen.out
        else:
            measured = self._measure(seat, value, what)
            source = None
            out = seat.id if site.kind == "out" else None
            self._seen[id(value)] = Seen(weakref.ref(value), version_of(value), what, measured, out)
        if site.kind == "in" and source not in seat.sources:
            seat.sources = (*seat.sources, source)

    def _begin(self, step: int) -> None:
        self.flush()
        self.step, self._step_level = step, self.level

    def _seat(self, site: Site, value: Tensor) -> Seat:
        """Return what is known of a site; with its first value it becomes known."""
        known = self.seats.get(site)
        if known is not None:
            return known
        dim = self._channel_dim(site, value)
        node = value.grad_fn.name() if value.grad_fn is not None else None
        dtype = str(value.dtype).removeprefix("torch.")
        shape, channels = () if value.is_nested else tuple(value.shape), None if dim is None else value.shape[dim]
        seat = Seat(site, len(self.seats), shape, dtype, channels, (), node)
        self.seats[site] = seat
        return seat

    def _channel_dim(self, site: Site, value: Tensor) -> int | None:
        if site.kind != "out" or site.path not in self.channel_dims or value.dim() < 2:
            return None
        return 1 if value.dim() != 3 else self.channel_dims[site.path]

    def _measure(self, seat: Seat, value: Tensor, what: str) -> Measured:
        value = own_part(value)
        if not reduce.measurable(value):
            return self._pass_over(seat, value)
        elements, table = reduce.flat(value), self._table_on(value.device)
        measured = Measured(seat.id, elements.numel(), value.device, table.used)
        start = table.now()
        _REDUCE[what](elements, table.slot())
        if what == "full":
            measured = self._add_channels(measured, seat, value, table)
            if self.draws:
                measured = self._draw(measured, seat, value, elements)
        if start is not None:
            table.spans.append((start, table.now()))
        self._measured.append(measured)
        return measured

    def _add_channels(self, measured: Measured, seat: Seat, value: Tensor, table: DeviceTable) -> Measured:
        dim = self._channel_dim(seat.site, value)
        if dim is None or seat.channels is None or value.shape[dim] != seat.channels:
            return measured
        start = table.wide_used
        reduce.channels(value, dim, table.room(seat.channels))
        return measured._replace(channels=(start, table.wide_used))

    def _draw(self, measured: Measured, seat: Seat, value: Tensor, elements: Tensor) -> Measured:
        """Take some elements along, for the histogram of magnitudes and the share that is saturated."""
        saturation = self.saturations.get(seat.site.path) if seat.site.kind == "out" else None
        if saturation is not None and saturation.dim is not None:
            elements = reduce.flat(saturation.deciding(value))
        some, table = reduce.drawn(elements), self._table_on(value.device)
        start = table.wide_used
        table.room(some.numel()).copy_(some)
        return measured._replace(drawn=(start, table.wide_used), saturation=saturation)

    def _pass_over(self, seat: Seat, value: Tensor) -> Measured:
        """Note that a value was there; of whole numbers also how many, and that all are finite."""
        whole = not (value.is_floating_point() or value.is_complex() or value.is_nested)
        table = self._table_on(_HOST)
        measured = Measured(seat.id, value.numel() if whole else 0, _HOST, table.used)
        table.slot().nonfinite.zero_()
        self._measured.append(measured)
        return measured

    def _table_on(self, device: torch.device) -> DeviceTable:
        table = self._tables.get(device)
        if table is None:
            table = self._tables[device] = DeviceTable(device)
        return table

    def add(
        self,
        sites: Sequence[Site],
        step: int,
        tensors: Sequence[Tensor],
        total: Site | None = None,
        *,
        parts: Parts = "all",
    ) -> bool:
        """Measure the norms of many tensors at once, one a site, such as all parameters.

        Args:
            sites: Where they belong.
            step: The step.
            tensors: The tensors, of any devices.
            total: The site that stands for all of them together, where there is one.
            parts: Which of the others are recorded beside it: "all", "none", or all if one is "bad", that is not finite.

        Returns:
            Whether something is known not to be finite; on a GPU, where asking waits, never.
        """
        with self._lock:
            if step != self.step:
                self._begin(step)
            by_device: dict[torch.device, list[tuple[Seat, Tensor]]] = {}
            for site, tensor in zip(sites, tensors, strict=True):
                if reduce.measurable(own := own_part(tensor)):
                    by_device.setdefault(tensor.device, []).append((self._seat(site, tensor), own))
            bulks = [self._norms(group) for group in by_device.values()]
            if total is not None:
                whole = self._total_seat(total, sum(t.numel() for t in tensors)).id
                self.curves.add(whole)
                bulks = [b._replace(total=whole, parts=parts) for b in bulks]
            self._bulk += bulks
            return any(b.arrived is None and not np.isfinite(b.norms.numpy()).all() for b in bulks)

    def _total_seat(self, site: Site, size: int) -> Seat:
        seat = self.seats.get(site)
        if seat is None:
            seat = self.seats[site] = Seat(site, len(self.seats), (size,), "float32", None, (), None)
        return seat

    def add_values(self, step: int, held: Sequence[tuple[Seat, Tensor]]) -> bool:
        """Measure the norms of many values at once; those that are not finite are looked at closely.

        Returns:
            Whether something is known not to be finite.
        """
        with self._lock:
            if step != self.step:
                self._begin(step)
            by_device: dict[torch.device, list[tuple[Seat, Tensor]]] = {}
            for seat, spread in held:
                value = own_part(spread)
                if reduce.measurable(value):
                    by_device.setdefault(value.device, []).append((seat, value.detach()))
            bad = False
            for group in by_device.values():
                bulk = self._norms(group)
                if bulk.arrived is None and not (sound := np.isfinite(bulk.norms.numpy())).all():
                    bad = True
                    for good, (seat, value) in zip(sound, group, strict=True):
                        if not good:
                            self.observe(seat, value, step)
                    rest = [pair for good, pair in zip(sound, group, strict=True) if good]
                    bulk = self._norms(rest)
                self._bulk.append(bulk)
            return bad

    def _norms(self, group: list[tuple[Seat, Tensor]]) -> Bulk:
        ids = [seat.id for seat, _ in group]
        real = [reduce.real(t) for _, t in group]
        dtype = torch.float64 if any(t.dtype is torch.float64 for t in real) else torch.float32
        norms = torch.stack(list(kernels.norms(real, dtype=dtype))) if real else torch.zeros(0)
        return Bulk(ids, [t.numel() for t in real], *to_host(norms))

    def spoiled(self) -> bool:
        """Whether something measured in this step is known not to be finite; on a GPU, where asking waits, always true."""
        if not (self._measured or self._bulk):
            return False
        if any(device.type != "cpu" for device in self._tables):
            return True
        with reduce.plainly():
            return self._spoiled_on_host()

    def _spoiled_on_host(self) -> bool:
        return any(table.spoiled() for table in self._tables.values()) or any(
            not np.isfinite(b.norms.numpy()).all() for b in self._bulk
        )

    def flush(self, *, curves: bool = True) -> None:
        """End the step: send its tables on their way, and pass on those that have arrived.

        Args:
            curves: Record the curves of a light step.
        """
        with self._lock, reduce.plainly():
            self._seen.clear()
            if self._measured or self._bulk:
                snapshots = {d: t.take() for d, t in self._tables.items() if t.used}
                drawn = frozenset(self.curves) if curves else frozenset()
                self._pending.append(Step(self.step, self._step_level, self._measured, snapshots, self._bulk, drawn))
                self._measured, self._bulk = [], []
            self.step = -1  # what comes, in the same step even, is measured as closely as is asked for then
            while self._pending and (self._pending[0].ready() or len(self._pending) > _BEHIND):
                self._emit(self._pending.popleft())

    def finish(self) -> None:
        """Pass everything on, waiting for what is still on its way."""
        with self._lock:
            self.flush()
            while self._pending:
                self._emit(self._pending.popleft())

    def _emit(self, step: Step) -> None:
        self.device_seconds += sum(snapshot.seconds() for snapshot in step.snapshots.values())
        if step.level == FULL:
            self._pass_on(step.number, step.columns())
        elif self._is_news(step):
            for earlier in self._recent:
                self._pass_on(earlier.number, earlier.columns(earlier.is_no_curve, bad=True))
            self._recent.clear()
            self._pass_on(step.number, step.columns())
        else:
            if step.curves:
                self._pass_on(step.number, step.columns(step.curves.__contains__))
            self._recent.append(step)

    def _pass_on(self, number: int, columns: dict[str, Any]) -> None:
        if not len(columns["site"]):
            return
        if self.sink is not None:
            self.sink.stats(number, columns)
        else:
            self.series.setdefault(number, []).append({"step": number, **columns})
            while self.keep is not None and len(self.series) > self.keep:
                del self.series[next(iter(self.series))]

    def _is_news(self, step: Step) -> bool:
        """Whether something is not finite in a step in between that was finite in the one before.

        A module whose output is infinite in every step must not hide what goes wrong later.
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

    def _named(self, name: str) -> list[Seat]:
        term = single(name)
        seats = [s for s in self.seats.values() if term.names(s.site)]
        kind = kind_meant(term, {s.site.kind for s in seats})
        seats = [s for s in seats if s.site.kind == kind and term.leaf in (None, s.site.leaf)]
        return [s for s in seats if term.call in (None, s.site.call)]

    def _rows(self, site: int) -> Rows:
        names = ("site", "count", *FIELDS, "sampled", "saturated", "exponents")
        parts = [part for parts in self.series.values() for part in parts]
        rows = ((part, i) for part in parts for i in np.flatnonzero(part["site"] == site))
        return tabulate({"step": part["step"], **{n: part[n][i] for n in names}} for part, i in rows).rows(site)


def measure(what: What = "full", *, keep: int | None = 1000, recomputes: bool = False) -> Meter:
    """Make the action that measures: one row of statistics a site and step, without synchronisation.

    Several calls and passes of one step are merged. Read as ``stats["layer4"].rms``; a step's course
    as ``stats.records("layer4")``.

    Args:
        what: "full" for count, sum, sum of squares, min, max, non-zero and non-finite elements; "norm" for
            the sum of squares; "finite" for the sum, which is finite if every element is.
        keep: How many of the last steps to keep; None for all.
        recomputes: Also measure what a checkpoint's recompute makes.
    """
    if what not in _REDUCE:
        raise ValueError(f"measure({what!r}): it is one of {', '.join(map(repr, _REDUCE))}")
    if keep is not None and keep < 1:
        raise ValueError(f"measure(keep={keep}) would keep nothing; use 1 or more, or None for all")
    return Meter(what, keep=keep, recomputes=recomputes)
