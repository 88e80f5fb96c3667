"""Finished steps: their tables come from the devices in order, and become columns of the recording."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kedge.actions.measure.devices import Measured
from kedge.actions.measure.host import THERE, DevicePart, bits
from kedge.actions.measure.launched import DRAWN_ROWS, ROW_BYTES, SECONDS, LaunchedTable
from kedge.actions.measure.reduce import STATISTICS
from kedge.actions.measure.table import Departures, Snapshot
from kedge.flow import Sink
from kedge.native import on_device
from kedge.store import exponents
from kedge.store.columns import joined
from kedge.store.rows import FULL

_BEHIND = 8
"""Most steps whose tables may still be under way.

A program may be that far ahead of its device before Kedge waits.
"""
_SPOILED_KEPT = 32
"""Most light steps with non-finite values that are passed on."""


@dataclass
class FinishedStep:
    """A finished step, whose tables may not have arrived yet.

    Attributes:
        number: The number of the step.
        level: The level at which it was measured.
        measured: Its measurements on devices.
        snapshots: The tables of the devices.
        host: Its measurements in this process's memory, and those whose numbers will come from the
            devices of `launched`.
        launched: The tables of devices on which kernels were launched, by the device's index.
    """

    number: int
    level: int
    measured: list[Measured]
    snapshots: dict[torch.device, Snapshot]
    host: DevicePart
    launched: dict[int, LaunchedTable] = field(default_factory=dict)
    _is_filled: bool = False

    def spoiled(self) -> frozenset[int]:
        """The sites with non-finite values."""
        bad: set[int] = set()
        for part in (self._here(), *self._there()):
            bad.update(part.sites[~_sound(part.rows)[part.at]].tolist())
        return frozenset(bad - {-1})

    def is_empty(self) -> bool:
        """Whether all that was measured was discarded."""
        return not self.measured and bool((self.host.sites < 0).all())

    def ready(self) -> bool:
        """Whether every table has arrived."""
        arrived = all(snapshot.ready() for snapshot in self.snapshots.values())
        return arrived and all(table.ready() for table in self.launched.values())

    def device_seconds(self) -> float:
        """The seconds that the devices spent measuring, as far as they tell."""
        seconds = sum(snapshot.seconds() for snapshot in self.snapshots.values())
        there = self.host.there
        if there is None:
            return seconds
        devices, rows = there[:, 0], there[:, THERE.index("row")]
        for index, table in self.launched.items():
            own = rows[(devices == index) & (rows >= 0)]
            seconds += float(np.nansum(table.rows()[own, SECONDS]))
        return seconds

    def columns(self) -> dict[str, Any]:
        """The rows of the step as columns of the recording."""
        columns = joined([part.columns() for part in (self._here(), *self._there())])
        columns["calls"] = np.ones(len(columns["site"]), dtype=np.int32)
        columns["level"] = np.full(len(columns["site"]), self.level, dtype=np.int8)
        return columns

    def _here(self) -> DevicePart:
        """The measurements that have a row in this process's memory, with all numbers that have come from devices."""
        if not self._is_filled:
            for index, table in self.launched.items():
                _fill_in(self.host, index, table.rows())
            self._is_filled = True
        return self.host

    def _there(self) -> list[DevicePart]:
        """The measurements on devices, each with a row of its own."""
        parts = []
        for device, snapshot in self.snapshots.items():
            here = [measured for measured in self.measured if measured.device == device]
            rows, wide = snapshot.numpy()
            parts.append(_part(here, rows, wide))
        return parts


def _part(
    measured: list[Measured],
    rows: NDArray[Any],
    wide: NDArray[np.float32],
) -> DevicePart:
    table = on_device.folded(rows, [m.row for m in measured], [m.rows for m in measured])
    runs = np.array([m.drawn for m in measured], dtype=np.intp).reshape(-1, 2)
    lengths = runs[:, 1] - runs[:, 0]
    saturated = np.full(len(measured), -1, dtype=np.int32)
    active = {}
    for i, one in enumerate(measured):
        if one.saturation is not None:
            saturated[i] = one.saturation.count(wide[slice(*one.drawn)])
        if one.channels[1]:
            active[i] = bits(wide[slice(*one.channels)])
    return DevicePart(
        rows=np.column_stack([table, [m.size for m in measured]]),
        sampled=np.where(lengths > 0, lengths, -1).astype(np.int32),
        histograms=exponents.encode_all(exponents.count_runs(wide, runs)),
        sites=np.array([m.site for m in measured], dtype=np.int32),
        at=np.arange(len(measured)),
        saturated=saturated,
        active=active,
    )


def _fill_in(part: DevicePart, device: int, table: NDArray[np.float64]) -> None:
    """Fill in the numbers of values that were measured on a device."""
    there = part.there
    if there is None:
        return
    of_device = there[:, 0] == device
    _, rows, drawn, active, channels = there.T

    own = np.flatnonzero(of_device & (rows >= 0))
    part.rows[own, : len(STATISTICS)] = table[rows[own], : len(STATISTICS)]

    if not (of_device & ((drawn >= 0) | (active >= 0))).any():
        return
    first_places = dict(zip(part.at[::-1].tolist(), range(len(part.at) - 1, -1, -1), strict=True))
    own = np.flatnonzero(of_device & (drawn >= 0))
    counts = table.view(np.uint16).reshape(-1, ROW_BYTES // 2)
    places = drawn[own][:, None] + np.arange(DRAWN_ROWS)
    counts = counts[places].reshape(len(own), DRAWN_ROWS * ROW_BYTES // 2)
    histograms = exponents.encode_all(counts[:, : exponents.BUCKETS].astype(np.int64))
    outside = counts[:, exponents.BUCKETS].tolist()
    for row, histogram, saturated in zip(own.tolist(), histograms, outside, strict=True):
        part.histograms[row] = histogram
        place = first_places.get(row)
        if place is not None and part.saturated[place] >= 0:
            part.saturated[place] = saturated

    flags = table.view(np.uint8).reshape(-1)
    for row in np.flatnonzero(of_device & (active >= 0)).tolist():
        place = first_places.get(row)
        if place is not None:
            start = int(active[row]) * ROW_BYTES
            part.active[place] = bits(flags[start : start + int(channels[row])])


def _sound(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each row of a light step belongs to a value without non-finite elements."""
    has_finite_sum = np.isfinite(rows[:, :2]).any(axis=1)
    return np.asarray(has_finite_sum | (rows[:, STATISTICS.index("nonfinite")] == 0))


class ColumnsOfStep(Mapping[str, Any]):
    """The rows of a finished step as columns of the recording, made when the first is read.

    Of most steps that `kedge.actions.measure.results.KeptSteps` keeps, none is. Large tables are
    not kept for that: these are the `snapshots` of devices.
    """

    def __init__(self, step: FinishedStep) -> None:
        self._step: FinishedStep | None = step
        self._made: dict[str, Any] = {}
        if step.snapshots:
            self._columns()

    def __getitem__(self, name: str) -> Any:
        """A column."""
        return self._columns()[name]

    def __iter__(self) -> Iterator[str]:
        """The names of the columns."""
        return iter(self._columns())

    def __len__(self) -> int:
        """The number of columns."""
        return len(self._columns())

    def _columns(self) -> dict[str, Any]:
        if self._step is not None:
            self._made = self._step.columns()
            self._step = None
        return self._made


class FinishedSteps:
    """The finished steps that wait for their tables.

    A light step is passed on only if a site has non-finite values that was finite at the last
    check, so that a module whose output is infinite in every step does not hide later failures.

    Attributes:
        sink: Receives the columns of each step.
        departures: Takes tables to the host.
        device_seconds: Seconds that the devices spent measuring the steps passed on.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.departures = Departures()
        self.device_seconds = 0.0
        self._waiting: deque[FinishedStep] = deque()
        self._spoiled: frozenset[int] = frozenset()
        self._spoiled_left = _SPOILED_KEPT

    def __bool__(self) -> bool:
        """Whether a step is waiting."""
        return bool(self._waiting)

    def add(self, step: FinishedStep | None, *, finite: bool) -> None:
        """Add a step, and pass on the steps whose tables have arrived.

        Args:
            step: The step; None if it has no measurements.
            finite: Whether all was finite in a step without measurements, so that non-finite values
                later are news.
        """
        self.departures.send()
        if step is not None:
            self._waiting.append(step)
        elif finite and not self._waiting:
            self._spoiled = frozenset()
        if self._waiting:
            self.pass_on(most_waiting=_BEHIND)

    def pass_on(self, *, most_waiting: int = 0) -> None:
        """Pass on the steps whose tables have arrived, and older ones until at most this many wait."""
        while self._waiting and (self._waiting[0].ready() or len(self._waiting) > most_waiting):
            step = self._waiting.popleft()
            if step.level == FULL or self._is_news(step):
                self._pass_on(step)
            # The times are known when the numbers are, for which the lines above may have waited.
            self.device_seconds += step.device_seconds()

    def _pass_on(self, step: FinishedStep) -> None:
        if not step.is_empty():
            self.sink.stats(step.number, ColumnsOfStep(step))

    def _is_news(self, step: FinishedStep) -> bool:
        """Whether a site that was finite at the last check has non-finite values in this light step."""
        known = self._spoiled
        self._spoiled = step.spoiled()
        if self._spoiled <= known or self._spoiled_left == 0:
            return False
        self._spoiled_left -= 1
        return True
