"""Statistics instead of values: `measure`."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kedge.actions import reduce
from kedge.actions.naming import kind_meant, single
from kedge.actions.table import FIELDS, Bulk, DeviceTable, Measured, Step, to_host
from kedge.errors import NotRecorded, SeveralRecorded
from kedge.flow import Act, Event, Sink, version_of
from kedge.sites.site import Site
from kedge.store.rows import FINITENESS, FULL, STATISTICS, Rows
from kedge.store.table import tabulate

What = Literal["full", "norm", "finite"]
_REDUCE = {"full": reduce.full, "norm": reduce.norm, "finite": reduce.finite}
_HOST = torch.device("cpu")
_BEHIND = 2
_SPOILED_KEPT = 32


class Seen(NamedTuple):
    """A tensor that was measured in this step, so that nothing is measured twice."""

    ref: weakref.ref[Tensor]
    version: int
    what: str
    measured: Measured
    out: int | None

    def serves(self, value: Tensor, what: str) -> bool:
        """Whether what was measured of it is what is asked for now."""
        same = self.ref() is value and self.version == version_of(value) >= 0
        return same and what in {self.what, "finite"}


@dataclass
class Seat:
    """What is known of one measured site.

    Attributes:
        site: The site.
        id: Its number, in the order of first firing.
        shape: Shape of the first value.
        dtype: Its dtype, as "float32".
        channels: Number of channels, where activity is tracked.
        sources: Numbers of the sites whose outputs it was given; None for a tensor no site made.
        node: The autograd node that made its first value.
    """

    site: Site
    id: int
    shape: tuple[int, ...]
    dtype: str
    channels: int | None
    sources: tuple[int | None, ...]
    node: str | None


@dataclass(frozen=True)
class Statistics:
    """What was measured of one site in one step.

    `sum`, `sumsq`, `min` and `max` are of all elements in float32, NaN or infinite if an element is,
    NaN also if not measured; `nonzero` and `nonfinite` count elements, -1 if not measured.
    """

    site: Site
    step: int
    rows: Rows

    def __getattr__(self, name: str) -> float:
        """Any column of the recording, and what is derived: mean, rms, std, absmax, zero."""
        rows: Rows = self.__dict__["rows"]
        if name in STATISTICS and name not in ("min", "max"):
            return float(rows.statistic(name)[0])
        if name in ("sum", "sumsq", "min", "max", "nonzero", "calls", "count"):
            value = getattr(rows, name)[0]
            return float(value) if isinstance(value, np.floating) else int(value)
        raise AttributeError(name)

    def __str__(self) -> str:
        """One line."""
        shown = "  ".join(f"{n} {getattr(self, n):.4g}" for n in ("mean", "std", "rms", "min", "max", "zero"))
        return f"{self.site}  step {self.step}  count {self.count}  {shown}  nonfinite {self.nonfinite:g}"


class Meter:
    """The action that `measure` makes: sums values up on their device, one table a step."""

    observes = True

    def __init__(
        self, what: What = "full", *, keep: int | None = 1000, recomputes: bool = False, sink: Sink | None = None
    ) -> None:
        self.what, self.recomputes, self.sink = what, recomputes, sink
        self.level, self.muted, self.keep = FULL, False, keep
        self.channel_dims: dict[str, int | None] = {}
        self.seats: dict[Site, Seat] = {}
        self.series: dict[int, list[Mapping[str, Any]]] = {}
        self.step, self._step_level = -1, FULL
        self._tables: dict[torch.device, DeviceTable] = {}
        self._measured: list[Measured] = []
        self._bulk: list[Bulk] = []
        self._spoiled: frozenset[int] = frozenset()
        self._spoiled_left = _SPOILED_KEPT
        self.events = 0
        self.seconds = 0.0
        self._seen: dict[int, Seen] = {}
        self._pending: deque[Step] = deque()
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        """As one would write it."""
        return f"measure({self.what!r})"

    def bind(self, site: Site) -> Act:
        """Return what measures the values of one site."""
        seat: Seat | None = None
        forward = not site.is_gradient

        def observe(value: Tensor, event: Event) -> None:
            nonlocal seat
            if not self.level or (forward and self.muted) or torch._C._is_tracing():
                return
            start = time.perf_counter()
            with self._lock:
                if reduce.transforms():
                    seat = self._observe_whole(site, value, event.step)
                else:
                    seat = seat or self._seat(site, value)
                    self.observe(seat, value, event.step)
            self.events += 1
            self.seconds += time.perf_counter() - start

        return observe

    def _observe_whole(self, site: Site, value: Tensor, step: int) -> Seat:
        with reduce.plainly():
            inner = reduce.whole(value)
            seat = self._seat(site, inner)
            seat.channels = None  # under `vmap` the samples' dimension may be anywhere
            self.observe(seat, inner, step)
        return seat

    def observe(self, seat: Seat, value: Tensor, step: int) -> None:
        """Measure a value, unless this very tensor was measured in this step already."""
        site = seat.site
        if step != self.step:
            self._begin(step)
        if self.level == FINITENESS and not reduce.measurable(value):
            return
        what = "finite" if self.level == FINITENESS or site.kind == "in" else self.what
        seen = self._seen.get(id(value))
        if seen is not None and seen.serves(value, what):
            self._measured.append(seen.measured._replace(site=seat.id, channels=(0, 0)))
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
        seat = Seat(
            site, len(self.seats), () if value.is_nested else tuple(value.shape), str(value.dtype).removeprefix("torch."),
            None if dim is None else value.shape[dim], (), node,
        )  # fmt: skip
        self.seats[site] = seat
        return seat

    def _channel_dim(self, site: Site, value: Tensor) -> int | None:
        if site.kind != "out" or site.path not in self.channel_dims or value.dim() < 2:
            return None
        return 1 if value.dim() != 3 else self.channel_dims[site.path]

    def _measure(self, seat: Seat, value: Tensor, what: str) -> Measured:
        if not reduce.measurable(value):
            return self._pass_over(seat, value)
        elements, table = reduce.flat(value), self._table_on(value.device)
        measured = Measured(seat.id, elements.numel(), value.device, table.used, (0, 0))
        _REDUCE[what](elements, table.slot())
        dim = self._channel_dim(seat.site, value)
        if dim is not None and what == "full" and value.shape[dim] == seat.channels:
            start = table.wide_used
            reduce.channels(value, dim, table.channels(seat.channels))
            measured = measured._replace(channels=(start, table.wide_used))
        self._measured.append(measured)
        return measured

    def _pass_over(self, seat: Seat, value: Tensor) -> Measured:
        """Note that a value was there; of whole numbers also how many, and that all are finite."""
        whole = not (value.is_floating_point() or value.is_complex() or value.is_nested)
        table = self._table_on(_HOST)
        measured = Measured(seat.id, value.numel() if whole else 0, _HOST, table.used, (0, 0))
        table.slot().nonfinite.zero_()
        self._measured.append(measured)
        return measured

    def _table_on(self, device: torch.device) -> DeviceTable:
        table = self._tables.get(device)
        if table is None:
            table = self._tables[device] = DeviceTable(device)
        return table

    def add(self, sites: Sequence[Site], step: int, tensors: Sequence[Tensor]) -> None:
        """Measure the norms of many tensors at once, one a site, such as all parameters.

        Args:
            sites: Where they belong.
            step: The step.
            tensors: The tensors, of any devices.
        """
        with self._lock:
            if step != self.step:
                self._begin(step)
            by_device: dict[torch.device, list[tuple[Site, Tensor]]] = {}
            for site, tensor in zip(sites, tensors, strict=True):
                by_device.setdefault(tensor.device, []).append((site, tensor))
            for group in by_device.values():
                self._bulk.append(self._norms(group))

    def _norms(self, group: list[tuple[Site, Tensor]]) -> Bulk:
        ids = [self._seat(site, tensor).id for site, tensor in group]
        real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for _, t in group]
        norms = torch.stack(list(torch._foreach_norm(real, dtype=torch.float32)))
        return Bulk(ids, [t.numel() for t in real], *to_host(norms))

    def spoiled(self) -> bool:
        """Whether something measured in this step is known not to be finite; on a GPU, where asking waits, always true."""
        if any(device.type != "cpu" for device in self._tables):
            return True
        return any(table.spoiled() for table in self._tables.values()) or any(
            not b.norms.isfinite().all() for b in self._bulk
        )

    def flush(self) -> None:
        """End the step: send its tables on their way, and pass on those that have arrived."""
        with self._lock, reduce.plainly():
            self._seen.clear()
            if self._measured or self._bulk:
                snapshots = {d: t.take() for d, t in self._tables.items() if t.used}
                self._pending.append(Step(self.step, self._step_level, self._measured, snapshots, self._bulk))
                self._measured, self._bulk = [], []
            while self._pending and (self._pending[0].ready() or len(self._pending) > _BEHIND):
                self._emit(self._pending.popleft())

    def finish(self) -> None:
        """Pass everything on, waiting for what is still on its way."""
        with self._lock:
            self.flush()
            while self._pending:
                self._emit(self._pending.popleft())

    def _emit(self, step: Step) -> None:
        if step.level == FINITENESS and not self._is_news(step):
            return
        columns = step.columns()
        if self.sink is not None:
            self.sink.stats(step.number, columns)
        else:
            self.series.setdefault(step.number, []).append({"step": step.number, **columns})
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
        rows = [self._rows(seat.id) for seat in found]
        return [Statistics(found[0].site, int(step), _row(r, i)) for r in rows for i, step in enumerate(r.step)]

    def _named(self, name: str) -> list[Seat]:
        term = single(name)
        seats = [s for s in self.seats.values() if s.site.path == term.literal]
        kind = kind_meant(term, {s.site.kind for s in seats})
        seats = [s for s in seats if s.site.kind == kind and term.leaf in (None, s.site.leaf)]
        return [s for s in seats if term.call in (None, s.site.call)]

    def _rows(self, site: int) -> Rows:
        names = ("site", "count", *FIELDS)
        parts = [part for parts in self.series.values() for part in parts]
        rows = ((part, i) for part in parts for i in np.flatnonzero(part["site"] == site))
        return tabulate({"step": part["step"], **{n: part[n][i] for n in names}} for part, i in rows).rows(site)


def _row(rows: Rows, i: int) -> Rows:
    one = slice(i, i + 1)
    numbers = {n: getattr(rows, n)[one] for n in Rows.__dataclass_fields__ if n != "active"}
    return Rows(**numbers, active=rows.active[one])


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
