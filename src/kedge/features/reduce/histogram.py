"""Histograms of features, exactly mergeable, with given or automatic edges.

# Note [Edges that merge]
Bin `i` of an automatic histogram is ``[i 2^k, (i + 1) 2^k)``, and two neighbouring bins of one `k`
are one bin of ``k + 1``. So counts can be made coarser exactly, without the samples. `k` is the
smallest power for which the bins from the least to the greatest value seen do not exceed the limit;
it depends on these two values alone, in any order of samples, and only grows. A lower bound on `k`
keeps bin numbers exact: no value is more than 2^52 bins from zero, and no bin is narrower than the
smallest float64. Edges beyond the largest float64 are infinite.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.errors import ReducerError
from kedge.features.reduce.reducer import Positions, Reducer, State

Per = Literal["whole", "channel"]

_ASIDE = ("nan", "-inf", "inf")


class Histogram(Reducer):
    """A reducer that counts values between edges; each position of a sample is a value unless positions are pooled.

    With edges, bins are as in `numpy.histogram`: ``[a, b)``, the last ``[a, b]``. Without, all bins
    have the same width, a power of two, and begin at its multiples: the smallest for which at most
    `bins` of them reach from the smallest to the largest value. Either way counts are exact and
    merge exactly.

    The result has `n` (values), `counts`, `edges`, `under`, `over`, `nan`, `-inf` and `inf`; with
    `per="channel"` each has the channels as its first dimension, except for given edges.

    Args:
        edges: Increasing finite numbers; None for automatic edges.
        bins: The largest number of automatic bins.
        per: "whole" for one histogram, "channel" for one of each channel.
        positions: What to do with values of more than two dimensions: "samples", "mean", "max" or
            "elements".
        channel: The dimension of the channels: 1 for images, -1 for tokens.

    Examples:
        >>> histogram = recipes.Histogram(edges=[0, 1, 2])
        >>> histogram.update(torch.tensor([[0.5], [1.5], [1.6]]))
        >>> histogram.result()["counts"].tolist()
        [1, 2]
    """

    def __init__(
        self,
        edges: Sequence[float] | None = None,
        *,
        bins: int = 64,
        per: Per = "whole",
        positions: Positions | None = "samples",
        channel: int = 1,
    ) -> None:
        given = None if edges is None else [float(edge) for edge in edges]
        super().__init__(edges=given, bins=bins, per=per, positions=positions, channel=channel)
        if given is not None and (len(given) < 2 or not _increase(given)):
            raise ReducerError(
                f"edges={given}: a histogram needs two or more finite numbers, each above the last"
            )
        if bins < 2:
            raise ReducerError(f"bins={bins}: values on both sides of zero need two bins or more")
        check_per(per)
        self.grid: FixedGrid | PowerGrid | None = None
        self.aside = _no_counts_aside(0)

    def result(self) -> dict[str, Any]:
        """Return the number of values, the counts, the edges, and the counts of values outside the edges."""
        grid, aside = self.grid, self.aside
        if grid is None:
            channels = 0 if self.settings["per"] == "channel" else 1
            grid, aside = self._new_grid(channels), _no_counts_aside(channels)
        found = grid.result()
        for number, name in enumerate(_ASIDE):
            found[name] = aside[:, number].clone()
        counted = found["counts"].sum(1) + found["under"] + found["over"] + aside.sum(1)
        if self.settings["per"] == "whole":
            return {"n": int(counted[0]), **_only(found)}
        return {"n": counted, **found}

    def _new_grid(self, channels: int) -> FixedGrid | PowerGrid:
        edges = self.settings["edges"]
        if edges is None:
            return PowerGrid(self.settings["bins"], channels)
        return FixedGrid(tuple(edges), channels)

    def _prepare(self, channels: int) -> FixedGrid | PowerGrid:
        if self.grid is None:
            self.grid = self._new_grid(channels)
            self.aside = _no_counts_aside(channels)
        return self.grid

    def _take(self, values: Tensor, _keys: Sequence[str] | None, /) -> None:
        for piece in self._pieces(values):
            rows = arranged(piece, self.settings["per"]).double() + 0.0  # -0.0 is 0.0
            grid = self._prepare(rows.shape[1])
            finite = rows.isfinite()
            if not finite.all():
                aside = (rows.isnan(), rows.isneginf(), rows.isposinf())
                self.aside += torch.stack([mask.sum(0) for mask in aside], 1).cpu()
            grid.count(rows, finite)

    def _merge(self, other: Self) -> None:
        if other.grid is not None:
            # Of the same kind as the other's, because the settings are equal.
            grid: Any = self._prepare(len(other.aside))
            grid.merge(other.grid)
            self.aside += other.aside

    def _state(self) -> State:
        counts = {} if self.grid is None else self.grid.state()
        return counts | {"aside": self.aside}

    def _load(self, state: State) -> None:
        self.grid, self.aside = None, state["aside"]
        if "counts" in state:
            self.grid = self._new_grid(len(self.aside))
            self.grid.load(state)


def _no_counts_aside(channels: int) -> Tensor:
    return torch.zeros(channels, len(_ASIDE), dtype=torch.int64)


def arranged(rows: Tensor, per: Per) -> Tensor:
    """Return rows with one column for each summary."""
    return rows.reshape(-1, 1) if per == "whole" else rows


def check_per(per: str) -> None:
    """Check that `per` is "whole" or "channel"."""
    if per not in ("whole", "channel"):
        raise ReducerError(
            f"per={per!r}: use 'whole' for one summary, or 'channel' for one per channel"
        )


def _only(found: dict[str, Tensor]) -> dict[str, Any]:
    """Return the single histogram of all values, without empty automatic bins at its end."""
    edges, counts = found["edges"], found["counts"][0]
    last = len(counts)
    if edges.dim() == 2:  # automatic
        edges = edges[0]
        if counts.any():
            last = int(counts.nonzero().max()) + 1
    outside = {name: int(found[name]) for name in ("under", "over", *_ASIDE)}
    return {"edges": edges[: last + 1], "counts": counts[:last], **outside}


def _increase(edges: list[float]) -> bool:
    pairs = itertools.pairwise(edges)
    return all(map(math.isfinite, edges)) and all(low < high for low, high in pairs)


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
        least = np.minimum(self.least, least)
        most = np.maximum(self.most, most)
        self._widen(least, most, self.power)
        first = torch.from_numpy(self._first()).to(rows.device)
        bins = _numbers_of(torch.where(finite, rows, 0.0), self.power) - first
        self.counts += tally(bins, finite, self.counts.shape[1]).numpy()

    def merge(self, other: PowerGrid) -> None:
        """Add another grid's counts, after making both as coarse as necessary."""
        least = np.minimum(self.least, other.least)
        most = np.maximum(self.most, other.most)
        self._widen(least, most, np.maximum(self.power, other.power))
        up = self.power - other.power
        self.counts += _coarser(other.counts, other._first(), up, self._first())

    def state(self) -> State:
        """Return powers, extremes and counts."""
        names = ("power", "least", "most", "counts")
        return {name: torch.from_numpy(getattr(self, name)) for name in names}

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
    low = np.where(seen, least, 0.0)
    high = np.where(seen, most, 0.0)
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
