"""The bins of a histogram: between given edges, or of a width that is a power of two.

# Note [Edges that merge]
Bin `i` of an automatic histogram is ``[i 2^k, (i + 1) 2^k)``, and two neighbouring bins of one `k`
are one bin of ``k + 1``. So counts can be made coarser exactly, without the samples. `k` is the
smallest power for which the bins from the least to the greatest value seen do not exceed the limit;
it depends on these two values alone, in any order of samples, and only grows. A lower bound on `k`
keeps bin numbers exact: no value is more than 2^52 bins from zero, and no bin is narrower than the
smallest float64. Edges beyond the largest float64 are infinite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.features.reduce.reducer import State

_DIGITS = 52
_LEAST = -1074  # the power of two that is the smallest float64
_FARTHEST = 63

Numbers = NDArray[np.int64]


class FixedGrid:
    """Counts between given edges, as `numpy.histogram` does: bins are open to the right, the last is closed."""

    def __init__(self, edges: tuple[float, ...], channels: int) -> None:
        self.edges = torch.tensor(edges, dtype=torch.float64)
        self.counts = torch.zeros(channels, len(edges) + 1, dtype=torch.int64)

    def count(self, rows: Tensor, finite: Tensor) -> None:
        """Count the finite elements of rows ``[rows, channels]`` of float64."""
        edges = self.edges.to(rows.device)
        bins = torch.searchsorted(edges, rows.contiguous(), right=True)
        bins = torch.where(rows == edges[-1], len(edges) - 1, bins)
        self.counts += tally(bins, finite, self.counts.shape[1])

    def merge(self, other: FixedGrid) -> None:
        """Add another grid's counts."""
        self.counts += other.counts

    def state(self) -> State:
        """Return the counts."""
        return {"counts": self.counts}

    def load(self, state: State) -> None:
        """Set the counts."""
        self.counts = state["counts"]

    def result(self) -> dict[str, Any]:
        """Return edges ``[bins + 1]``, counts ``[channels, bins]``, and counts under and over the edges ``[channels]``."""
        inside = self.counts[:, 1:-1].clone()
        outside = {"under": self.counts[:, 0].clone(), "over": self.counts[:, -1].clone()}
        return {"edges": self.edges.clone(), "counts": inside} | outside


class PowerGrid:
    """Counts in bins of a power of two that widen as values come; see Note [Edges that merge].

    Attributes:
        power: `k` of each channel.
        least: The least value of each channel; infinity before its first value.
        most: The greatest value of each channel; minus infinity before its first value.
        counts: ``[channels, bins]``; the first bin contains the least value.
    """

    def __init__(self, bins: int, channels: int) -> None:
        self.power = np.full(channels, _LEAST, dtype=np.int64)
        self.least = np.full(channels, np.inf)
        self.most = np.full(channels, -np.inf)
        self.counts: Numbers = np.zeros((channels, bins), dtype=np.int64)

    def count(self, rows: Tensor, finite: Tensor) -> None:
        """Count the finite elements of rows ``[rows, channels]`` of float64."""
        least = torch.where(finite, rows, torch.inf).amin(0).cpu().numpy()
        most = torch.where(finite, rows, -torch.inf).amax(0).cpu().numpy()
        self._widen(np.minimum(self.least, least), np.maximum(self.most, most), self.power)
        first = torch.from_numpy(self._first()).to(rows.device)
        bins = _numbers_of(torch.where(finite, rows, 0.0), self.power) - first
        self.counts += tally(bins, finite, self.counts.shape[1]).numpy()

    def merge(self, other: PowerGrid) -> None:
        """Add another grid's counts, after making both as coarse as necessary."""
        least, most = np.minimum(self.least, other.least), np.maximum(self.most, other.most)
        self._widen(least, most, np.maximum(self.power, other.power))
        added = _coarser(other.counts, other._first(), self.power - other.power, self._first())
        self.counts += added

    def state(self) -> State:
        """Return powers, extremes and counts."""
        held = {"power": self.power, "least": self.least, "most": self.most, "counts": self.counts}
        return {name: torch.from_numpy(value) for name, value in held.items()}

    def load(self, state: State) -> None:
        """Set powers, extremes and counts."""
        self.power, self.least, self.most, self.counts = (
            state[name].numpy() for name in ("power", "least", "most", "counts")
        )

    def result(self) -> dict[str, Any]:
        """Return edges ``[channels, bins + 1]`` and counts ``[channels, bins]``; `under` and `over` are 0."""
        numbers = self._first()[:, None] + np.arange(self.counts.shape[1] + 1)
        with np.errstate(over="ignore"):
            edges = np.ldexp(numbers.astype(np.float64), self.power[:, None])
        nothing = torch.zeros(len(self.power), dtype=torch.int64)
        counts = torch.from_numpy(self.counts.copy())
        return {
            "edges": torch.from_numpy(edges),
            "counts": counts,
            "under": nothing,
            "over": nothing.clone(),
        }

    def _widen(self, least: NDArray[np.float64], most: NDArray[np.float64], power: Numbers) -> None:
        """Make the counts as coarse as these extremes require."""
        before = self._first()
        power = _power_for(least, most, power, self.counts.shape[1])
        up = power - self.power
        self.power, self.least, self.most = power, least, most
        self.counts = _coarser(self.counts, before, up, self._first())

    def _first(self) -> Numbers:
        return _floors(np.where(np.isfinite(self.least), self.least, 0.0), self.power)


def tally(bins: Tensor, counted: Tensor, width: int) -> Tensor:
    """Return the number of `counted` elements in each bin, ``[channels, width]`` on the CPU.

    `bins` are bin numbers and `counted` a mask, both ``[rows, channels]``.
    """
    channels = bins.shape[1]
    bins = torch.where(counted, bins, width)  # one more bin for elements outside the mask
    places = bins + torch.arange(channels, device=bins.device) * (width + 1)
    found = torch.bincount(places.flatten(), minlength=channels * (width + 1))
    return found.reshape(channels, width + 1)[:, :width].cpu()


def _power_for(
    least: NDArray[np.float64], most: NDArray[np.float64], power: Numbers, bins: int
) -> Numbers:
    """Return the smallest powers, at least those given, for which the bins suffice."""
    seen = np.isfinite(least)
    low, high = np.where(seen, least, 0.0), np.where(seen, most, 0.0)
    magnitude = np.maximum(np.abs(low), np.abs(high))
    exponent = np.where(magnitude > 0, np.frexp(magnitude)[1], _LEAST)
    power = np.maximum(power, exponent - _DIGITS)
    while (wide := _floors(high, power) - _floors(low, power) >= bins).any():
        power = power + wide
    return power


def _floors(values: NDArray[np.float64], power: Numbers) -> Numbers:
    """Return the bin number of each value; that of a negative value is negative, even if scaling underflows to zero."""
    numbers = np.floor(np.ldexp(values, -power)).astype(np.int64)
    return np.where(values < 0, np.minimum(numbers, -1), numbers)


def _numbers_of(rows: Tensor, power: Numbers) -> Tensor:
    """Return the bin numbers of rows without -0.0; scaled in two steps, because one factor may exceed float64."""
    halves = -power // 2
    for exponent in (halves, -power - halves):
        rows = rows * torch.from_numpy(np.ldexp(1.0, exponent)).to(rows.device)
    numbers = rows.floor().long()
    return torch.where(torch.signbit(rows), numbers.clamp(max=-1), numbers)


def _coarser(counts: Numbers, first: Numbers, up: Numbers, new_first: Numbers) -> Numbers:
    """Return counts in bins wider by ``2**up``, the first of which has another number."""
    channels, bins = counts.shape
    numbers = (first[:, None] + np.arange(bins)) >> np.minimum(up, _FARTHEST)[:, None]
    target = numbers - new_first[:, None]
    held = counts > 0
    places = (target + bins * np.arange(channels)[:, None])[held]
    coarser = np.zeros(channels * bins, dtype=np.int64)
    np.add.at(coarser, places, counts[held])
    return coarser.reshape(channels, bins)
