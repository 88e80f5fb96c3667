"""The statistics of one step: one table on each device, which leaves it once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK = 256
FIELDS = ("sum", "sumsq", "min", "max", "nonzero", "nonfinite")


class Slot:
    """One row of a table on a device: a scalar tensor a statistic, to write to."""

    __slots__ = (*FIELDS, "_host")

    def __init__(self, row: Tensor, host: NDArray[Any] | None) -> None:
        self.sum, self.sumsq, self.min, self.max, self.nonzero, self.nonfinite = row.unbind()
        self._host = host

    def host_sum(self) -> float:
        """The sum, on a CPU, where reading it waits for nothing."""
        return float(self._host[0]) if self._host is not None else float("nan")


class Snapshot(NamedTuple):
    """A table on its way to the host.

    Attributes:
        rows: Host tensor of one row a measurement.
        channels: Host tensor of all channel maxima, one measurement after another.
        arrived: The CUDA event after which they can be read; None if they can be already.
    """

    rows: Tensor
    channels: Tensor
    arrived: Any

    def ready(self) -> bool:
        """Whether reading would wait for nothing."""
        return self.arrived is None or bool(self.arrived.query())

    def numpy(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The rows and the channel maxima, waiting for them if they have not arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.rows.numpy(), self.channels.numpy()


class DeviceTable:
    """Rows of float32 on one device, handed out one by one and used again in the next step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: list[Tensor] = []
        self.slots: list[Slot] = []
        self.used = 0
        self.wide = torch.empty(0, dtype=torch.float32, device=device)
        self.wide_used = 0

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
            host = block.numpy() if self.device.type == "cpu" else None
            self.slots.extend(Slot(row, None if host is None else host[i]) for i, row in enumerate(block))
        self.blocks.append(block)

    def channels(self, count: int) -> Tensor:
        """Hand out room for one number a channel."""
        if self.wide_used + count > len(self.wide):
            with torch.inference_mode(mode=False):
                more = self.wide.new_empty(max(count, len(self.wide), _BLOCK))
                self.wide = torch.cat([self.wide, more])
        start, self.wide_used = self.wide_used, self.wide_used + count
        return self.wide[start : self.wide_used]

    def spoiled(self) -> bool:
        """Whether a sum or a sum of squares is not finite, on a CPU; what was not measured is NaN in both."""
        taken = torch.cat(self.blocks)[: self.used, :2] if self.blocks else torch.zeros(0, 2)
        return bool((~taken.isfinite()).all(dim=1).any())

    def take(self) -> Snapshot:
        """Send the used rows to the host, in one copy, and begin anew."""
        used, wide = self.used, self.wide_used
        self.used = self.wide_used = 0
        whole = torch.cat([*(block.view(-1) for block in self.blocks), self.wide[:wide]])
        for block in self.blocks:
            block.fill_(float("nan"))
        host, arrived = to_host(whole)
        size = len(self.blocks) * _BLOCK * len(FIELDS)
        return Snapshot(host[:size].view(-1, len(FIELDS))[:used], host[size:], arrived)


def to_host(whole: Tensor) -> tuple[Tensor, Any]:
    """Send a tensor to the host without waiting; returns it with the CUDA event of its arrival."""
    if whole.device.type == "cpu":
        return whole, None
    if whole.device.type != "cuda":
        return whole.cpu(), None
    host = torch.empty(whole.shape, dtype=whole.dtype, device="cpu", pin_memory=True)
    host.copy_(whole, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return host, arrived


class Measured(NamedTuple):
    """One measurement within a step, before its numbers have come from the device."""

    site: int
    size: int
    device: torch.device
    row: int
    channels: tuple[int, int]


class Bulk(NamedTuple):
    """Norms of many tensors, computed by one call, on their way to the host."""

    sites: list[int]
    counts: list[int]
    norms: Tensor
    arrived: Any

    def host(self) -> Any:
        """The norms, waiting for them if they have not arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.norms.numpy()


@dataclass
class Step:
    """A finished step whose tables may still be on their way."""

    number: int
    level: int
    measured: list[Measured]
    snapshots: dict[torch.device, Snapshot]
    bulk: list[Bulk]

    def spoiled(self) -> frozenset[int]:
        """The sites whose sum or norm is not finite, in a step in which nothing else was taken."""
        finite = {device: np.isfinite(s.numpy()[0][:, 0]) for device, s in self.snapshots.items()}
        sites = [m.site for m in self.measured if not finite[m.device][m.row]]
        for bulk in self.bulk:
            sites += [site for site, good in zip(bulk.sites, np.isfinite(bulk.host()), strict=True) if not good]
        return frozenset(sites)

    def ready(self) -> bool:
        """Whether every table has arrived."""
        return all(s.ready() for s in self.snapshots.values()) and all(
            b.arrived is None or b.arrived.query() for b in self.bulk
        )

    def columns(self) -> dict[str, Any]:
        """The rows of the step as columns of the recording."""
        hosts = {device: snapshot.numpy() for device, snapshot in self.snapshots.items()}
        rows = [hosts[m.device][0][m.row] for m in self.measured] + [_bulk_rows(b) for b in self.bulk]
        table = np.vstack(rows).astype(np.float64)
        columns: dict[str, Any] = dict(zip(FIELDS, table.T, strict=True))
        for name in ("nonzero", "nonfinite"):
            columns[name] = np.nan_to_num(columns[name], nan=-1).astype(np.int64)
        ids = [m.site for m in self.measured] + [i for b in self.bulk for i in b.sites]
        counts = [m.size for m in self.measured] + [n for b in self.bulk for n in b.counts]
        columns["site"] = np.array(ids, dtype=np.int32)
        columns["count"] = np.array(counts, dtype=np.int64)
        columns["calls"] = np.ones(len(ids), dtype=np.int32)
        columns["level"] = np.full(len(ids), self.level, dtype=np.int8)
        active = [_bits(hosts[m.device][1][slice(*m.channels)]) for m in self.measured]
        columns["active"] = active + [b""] * (len(ids) - len(active))
        return columns


def _bulk_rows(bulk: Bulk) -> Any:
    rows = np.full((len(bulk.sites), len(FIELDS)), np.nan, dtype=np.float64)
    rows[:, FIELDS.index("sumsq")] = bulk.host().astype(np.float64) ** 2
    return rows


def _bits(maxima: Any) -> bytes:
    return np.packbits(maxima > 0).tobytes() if len(maxima) else b""
