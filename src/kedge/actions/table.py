"""The statistics of one step: one table on each device, which leaves it once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge import native
from kedge.actions import reduce
from kedge.actions.saturation import Saturation
from kedge.native.reductions import DRAWN, flat
from kedge.store import exponents

_BLOCK = 256
FIELDS = ("sum", "sumsq", "min", "max", "nonzero", "nonfinite")
"""The statistics of a row. A row on the host has their number of elements behind them."""
Keep = Callable[[int], bool]
Parts = Literal["all", "bad", "none"]


def _every(site: int) -> bool:
    return True


class Slot:
    """One row of a table on a device: a scalar tensor a statistic, to write to."""

    __slots__ = FIELDS

    def __init__(self, row: Tensor) -> None:
        self.sum, self.sumsq, self.min, self.max, self.nonzero, self.nonfinite = row.unbind()


class Snapshot(NamedTuple):
    """A table on its way to the host.

    Attributes:
        rows: One row a measurement.
        wide: Channel maxima and drawn elements, one measurement after another.
        arrived: The CUDA event after which they can be read; None if they can be already.
        spans: CUDA events before and after each measurement.
    """

    rows: NDArray[Any]
    wide: NDArray[np.float32]
    arrived: Any
    spans: list[tuple[Any, Any]]

    def ready(self) -> bool:
        """Whether reading would wait for nothing."""
        return self.arrived is None or bool(self.arrived.query())

    def seconds(self) -> float:
        """How long the device measured; 0 where the host did, whose time is taken there."""
        return float(sum(start.elapsed_time(end) for start, end in self.spans)) / 1000

    def numpy(self) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Both, waiting for them if they have not arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.rows, self.wide


class HostTable:
    """Rows of float64 in this process's memory, used again in the next step.

    Attributes:
        rows: A row a measurement, as `kedge.native.measure_into` writes it.
        memory: The same, as what is written to for the least.
        used: How many rows are used.
        numbers: Drawn elements, one measurement after another.
        drawn: How many of them are used.
    """

    def __init__(self) -> None:
        self.rows = native.table(_BLOCK)
        self.memory = self.rows.data
        self.used = 0
        self.numbers = np.empty(_BLOCK * DRAWN, dtype=np.float32)
        self.drawn = 0

    def next(self) -> int:
        """Return the number of the first row that is free; it is taken when `used` is raised."""
        if self.used == len(self.rows):
            self.rows = np.concatenate([self.rows, native.table(len(self.rows))])
            self.memory = self.rows.data
        return self.used

    def draw(self, value: Tensor) -> tuple[int, int]:
        """Take some elements of a value along; returns from where to where they are."""
        start = self.drawn
        if start + DRAWN > len(self.numbers):
            self.numbers = np.concatenate([self.numbers, np.empty_like(self.numbers)])
        count = native.draw_into(self.numbers, start, value)
        if not count:
            some = reduce.drawn(flat(value)).float().numpy()
            count = len(some)
            self.numbers[start : start + count] = some
        self.drawn += count
        return start, self.drawn

    def spoiled(self) -> bool:
        """Whether a sum or a sum of squares is not finite; what was not measured is NaN in both."""
        return not np.isfinite(self.rows[: self.used, :2]).any(axis=1).all()

    def take(self) -> Snapshot:
        """Hand the used rows over, and begin anew."""
        rows, numbers = self.rows[: self.used].copy(), self.numbers[: self.drawn].copy()
        self.rows[: self.used] = np.nan
        self.used = self.drawn = 0
        return Snapshot(rows, numbers, None, [])


class DeviceTable:
    """Rows of float32 on one device, handed out one by one and used again in the next step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: list[Tensor] = []
        self.slots: list[Slot] = []
        self.used = 0
        self.wide = torch.empty(0, dtype=torch.float32, device=device)
        self.wide_used = 0
        self.spans: list[tuple[Any, Any]] = []

    def now(self) -> Any:
        """Mark this moment in the device's own time, without waiting for it; None where it has no such marks."""
        if self.device.type != "cuda":
            return None
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    def slot(self) -> Slot:
        """Hand out the next row, filled with NaN: nothing measured."""
        if self.used == len(self.slots):
            self._grow()
        slot = self.slots[self.used]
        self.used += 1
        return slot

    def _grow(self) -> None:
        # What is made in inference mode could not be written to outside of it.
        with torch.inference_mode(mode=False):
            block = torch.full((_BLOCK, len(FIELDS)), float("nan"), dtype=torch.float32, device=self.device)
            self.slots.extend(map(Slot, block))
        self.blocks.append(block)

    def room(self, count: int) -> Tensor:
        """Hand out room for some numbers more."""
        if self.wide_used + count > len(self.wide):
            with torch.inference_mode(mode=False):
                more = self.wide.new_empty(max(count, len(self.wide), _BLOCK))
                self.wide = torch.cat([self.wide, more])
        start, self.wide_used = self.wide_used, self.wide_used + count
        return self.wide[start : self.wide_used]

    def take(self) -> Snapshot:
        """Send the used rows to the host, in one copy, and begin anew."""
        used, wide, spans = self.used, self.wide_used, self.spans
        self.used, self.wide_used, self.spans = 0, 0, []
        filled = self.blocks[: -(-used // _BLOCK)]
        parts = [block[: used - i * _BLOCK] for i, block in enumerate(filled)]
        whole = torch.cat([*(part.reshape(-1) for part in parts), self.wide[:wide]])
        for part in parts:
            part.fill_(float("nan"))
        host, arrived = to_host(whole)
        size = used * len(FIELDS)
        return Snapshot(host[:size].view(-1, len(FIELDS)).numpy(), host[size:].numpy(), arrived, spans)


def to_host(whole: Tensor) -> tuple[Tensor, Any]:
    """Send a tensor to the host without waiting; returns it with the CUDA event of its arrival.

    The copy runs on a stream of its own, so that what the program computes next does not wait for it either.
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


class Measured(NamedTuple):
    """One measurement within a step, before its numbers have come from the device.

    Attributes:
        site: The number of its site.
        size: How many elements it has.
        device: Where its row is.
        row: Which row that is.
        channels: From where to where its channels' maxima are, on a device.
        active: A bit a channel, whether it has a number above zero, on the host.
        drawn: From where to where the elements drawn from it are.
        saturation: How the site's activation saturates; None if it does not.
    """

    site: int
    size: int
    device: torch.device
    row: int
    channels: tuple[int, int] = (0, 0)
    active: bytes = b""
    drawn: tuple[int, int] = (0, 0)
    saturation: Saturation | None = None


class Bulk(NamedTuple):
    """Norms of many tensors, computed by one call, on their way to the host.

    Attributes:
        sites: The numbers of their sites.
        counts: How many elements each has.
        norms: The norms.
        arrived: The CUDA event after which they can be read; None if they can be already.
        total: The number of the site that stands for all of them together, if one does.
        parts: Which of the others are recorded beside it: "all", "none", or all if one is "bad".
    """

    sites: list[int]
    counts: list[int]
    norms: NDArray[Any]
    arrived: Any
    total: int | None = None
    parts: Parts = "all"

    def host(self) -> Any:
        """The norms, waiting for them if they have not arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.norms

    def squares(self, keep: Keep, *, bad: bool) -> Iterator[tuple[int, int, float]]:
        """Give the sites that are recorded, how many elements each has, and its sum of squares."""
        squares = self.host().astype(np.float64) ** 2
        if self.parts == "all" or (self.parts == "bad" and (bad or not np.isfinite(squares).all())):
            rows = zip(self.sites, self.counts, squares.tolist(), strict=True)
            yield from (row for row in rows if keep(row[0]))
        if self.total is not None and keep(self.total):
            yield self.total, sum(self.counts), float(squares.sum())


@dataclass
class Step:
    """A finished step whose tables may still be on their way.

    Attributes:
        number: Which one.
        level: What was measured in it.
        curves: The sites that are recorded even where nothing else of a light step is.
    """

    number: int
    level: int
    measured: list[Measured]
    snapshots: dict[torch.device, Snapshot]
    bulk: list[Bulk]
    curves: frozenset[int] = frozenset()

    def spoiled(self) -> frozenset[int]:
        """The sites of a light step that are known not to be finite."""
        hosts = {device: s.numpy()[0] for device, s in self.snapshots.items()}
        sites = [m.site for m in self.measured if not _sound(hosts[m.device][m.row])]
        for bulk in self.bulk:
            sites += [site for site, good in zip(bulk.sites, np.isfinite(bulk.host()), strict=True) if not good]
        return frozenset(sites)

    def ready(self) -> bool:
        """Whether every table has arrived."""
        return all(s.ready() for s in self.snapshots.values()) and all(
            b.arrived is None or b.arrived.query() for b in self.bulk
        )

    def is_no_curve(self, site: int) -> bool:
        """Whether a site has not been recorded as a curve of this step already."""
        return site not in self.curves

    def columns(self, keep: Keep = _every, *, bad: bool = False) -> dict[str, Any]:
        """The rows of the step as columns of the recording.

        Args:
            keep: Tells which sites' rows to give.
            bad: Give the parts of totals that are recorded where something is bad.
        """
        hosts = {device: snapshot.numpy() for device, snapshot in self.snapshots.items()}
        measured = [m for m in self.measured if keep(m.site)]
        bulk = [row for b in self.bulk for row in b.squares(keep, bad=bad)]
        table = np.full((len(measured) + len(bulk), len(FIELDS)), np.nan, dtype=np.float64)
        with np.errstate(invalid="ignore"):  # a NaN of a device's making may be one that signals
            for i, m in enumerate(measured):
                table[i] = hosts[m.device][0][m.row][: len(FIELDS)]
        table[len(measured) :, FIELDS.index("sumsq")] = [square for _, _, square in bulk]
        columns: dict[str, Any] = dict(zip(FIELDS, table.T, strict=True))
        for name in ("nonzero", "nonfinite"):
            known = ~np.isnan(columns[name])
            columns[name] = np.where(known, columns[name], -1).astype(np.int64)
        columns["site"] = np.array([m.site for m in measured] + [site for site, _, _ in bulk], dtype=np.int32)
        columns["count"] = np.array([m.size for m in measured] + [n for _, n, _ in bulk], dtype=np.int64)
        columns["calls"] = np.ones(len(table), dtype=np.int32)
        columns["level"] = np.full(len(table), self.level, dtype=np.int8)
        columns["active"] = [m.active or bits(hosts[m.device][1][slice(*m.channels)]) for m in measured]
        columns["active"] += [b""] * len(bulk)
        return columns | _drawn_columns(measured, hosts, len(bulk))


def _sound(row: NDArray[Any]) -> bool:
    """Tell whether a row of a light step is of a value whose elements are all finite."""
    return bool(np.isfinite(row[:2]).any() or row[FIELDS.index("nonfinite")] == 0)


def _drawn_columns(measured: list[Measured], hosts: Any, rest: int) -> dict[str, Any]:
    """Make histograms of the drawn elements, and count the saturated ones."""
    sampled = np.full(len(measured) + rest, -1, dtype=np.int32)
    saturated = sampled.copy()
    histograms = [b""] * len(sampled)
    with_some = [i for i, m in enumerate(measured) if m.drawn[1] > m.drawn[0]]
    if not with_some:
        return {"sampled": sampled, "saturated": saturated, "exponents": histograms}
    values = np.zeros((len(with_some), DRAWN), dtype=np.float32)
    for row, i in enumerate(with_some):
        m = measured[i]
        own = hosts[m.device][1][slice(*m.drawn)]
        values[row, : len(own)] = own
        sampled[i] = len(own)
        if m.saturation is not None:
            saturated[i] = m.saturation.count(own)
    for i, counts in zip(with_some, exponents.count(values), strict=True):
        histograms[i] = exponents.encode(counts)
    return {"sampled": sampled, "saturated": saturated, "exponents": histograms}


def bits(maxima: Any) -> bytes:
    """Pack whether the largest number of each channel is above zero."""
    return np.packbits(maxima > 0).tobytes() if len(maxima) else b""
