"""What is measured in this process's memory in one step: a table of rows, and which site each is of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kedge import native
from kedge.actions import reduce
from kedge.actions.saturation import Saturation
from kedge.native.reductions import DRAWN, flat
from kedge.store import exponents

_BLOCK = 256
STATISTICS = ("sum", "sumsq", "min", "max", "nonzero", "nonfinite")
"""The statistics of a row. A row on the host has their number of elements behind them."""
_WHOLE = [STATISTICS.index("nonzero"), STATISTICS.index("nonfinite")]


class Part(NamedTuple):
    """What was measured on one device in one step.

    Attributes:
        rows: A row a measured value: its statistics, and how many elements it has.
        sites: The number of each site that a value stood at.
        at: The row of that value; a value that stood at several sites was measured once.
        numbers: Elements drawn from the values, one value after another.
        spans: From where to where those of each row are.
        active: A bit a channel, whether it has a number above zero, of some places of `sites`.
        saturations: How the activations at some places of `sites` saturate.
    """

    rows: NDArray[np.float64]
    sites: NDArray[np.int32]
    at: NDArray[np.intp]
    numbers: NDArray[np.float32]
    spans: NDArray[np.intp]
    active: dict[int, bytes]
    saturations: list[tuple[int, Saturation]]

    def columns(self) -> dict[str, Any]:
        """The columns of the recording, without the places that were dropped."""
        chosen = np.flatnonzero(self.sites >= 0) if (self.sites < 0).any() else None
        at, sites = (self.at, self.sites) if chosen is None else (self.at[chosen], self.sites[chosen])
        table = self.rows.T.take(at, axis=1)  # each column in one piece
        columns: dict[str, Any] = dict(zip(STATISTICS, table, strict=False))
        for i in _WHOLE:
            columns[STATISTICS[i]] = np.where(np.isnan(table[i]), -1, table[i]).astype(np.int64)
        columns["site"], columns["count"] = sites, table[len(STATISTICS)].astype(np.int64)
        places = range(len(sites)) if chosen is None else chosen.tolist()
        columns["active"] = [self.active.get(place, b"") for place in places] if self.active else [b""] * len(sites)
        return columns | self._drawn(at, chosen)

    def _drawn(self, at: NDArray[np.intp], chosen: NDArray[np.intp] | None) -> dict[str, Any]:
        """Histograms of the drawn elements, and how many of them are saturated."""
        saturated = np.full(len(self.sites), -1, dtype=np.int32)
        if not len(self.numbers):
            none = np.full(len(at), -1, dtype=np.int32)
            return {"sampled": none, "saturated": saturated[: len(at)], "exponents": [b""] * len(at)}
        lengths = self.spans[:, 1] - self.spans[:, 0]
        self._count_saturated(saturated)
        if native.histograms is not None and lengths.sum() == len(self.numbers):
            histograms = native.histograms(self.numbers, self.spans[:, 1].tolist())
        else:
            histograms = exponents.encode_all(exponents.count_runs(self.numbers, self.spans))
        return {
            "sampled": np.where(lengths > 0, lengths, -1)[at].astype(np.int32),
            "saturated": saturated if chosen is None else saturated[chosen],
            "exponents": [histograms[row] for row in at.tolist()],
        }

    def _count_saturated(self, saturated: NDArray[np.int32]) -> None:
        """Count at each place whose activation saturates, those that saturate alike together."""
        alike: dict[Saturation, list[int]] = {}
        for place, saturation in self.saturations:
            alike.setdefault(saturation, []).append(place)
        for saturation, places in alike.items():
            spans = self.spans[self.at[places]]
            lengths = spans[:, 1] - spans[:, 0]
            flat = saturation.saturated(np.concatenate([self.numbers[start:end] for start, end in spans.tolist()]))
            found = np.concatenate([[0], np.cumsum(flat, dtype=np.int32)])
            ends = np.cumsum(lengths)
            saturated[places] = found[ends] - found[ends - lengths]


class HostTable:
    """Rows of float64 in this process's memory, used again in the next step.

    Attributes:
        rows: A row a value, as `kedge.native.measure_into` writes it.
        memory: The same, as what is written to for the least.
        room: How many rows there are.
        used: How many of them are used.
        numbers: Drawn elements, one value after another.
        drawn: How many of them are used.
        sites: The number of each site at which something was measured.
        at: Where its row is.
        ends: Up to where the elements drawn from each row's value are.
        active: See `Part`.
        saturations: See `Part`.
    """

    def __init__(self) -> None:
        self.rows = native.table(_BLOCK)
        self.memory, self.room = self.rows.data, _BLOCK
        self.numbers = np.empty(_BLOCK * DRAWN, dtype=np.float32)
        self.floats = self.numbers.data
        self._begin()

    def _begin(self) -> None:
        self.used = self.drawn = 0
        self.sites: list[int] = []
        self.at: list[int] = []
        self.ends: list[int] = []
        self.active: dict[int, bytes] = {}
        self.saturations: list[tuple[int, Saturation]] = []

    def make_room(self, count: int) -> int:
        """Have room for so many rows more, and for what is drawn with each; returns where they begin."""
        while self.used + count > self.room:
            self.rows = np.concatenate([self.rows, native.table(self.room)])
            self.numbers = np.concatenate([self.numbers, np.empty_like(self.numbers)])
            self.memory, self.floats, self.room = self.rows.data, self.numbers.data, len(self.rows)
        return self.used

    def take(self, site: int, drawing: Tensor | None = None) -> int:
        """Take the next row for the value at a site; returns its number.

        Args:
            site: The number of the site.
            drawing: What to draw elements from, if any are to be drawn.
        """
        row = self.used
        if drawing is not None:
            self.drawn += native.draw_into(self.floats, self.drawn, drawing) or self._draw_slowly(drawing)
        self.used = row + 1
        self.ends.append(self.drawn)
        self.sites.append(site)
        self.at.append(row)
        return row

    def _draw_slowly(self, value: Tensor) -> int:
        some = reduce.drawn(flat(value)).float().numpy()
        self.numbers[self.drawn :][: len(some)] = some
        return len(some)

    def measure_all(self, sites: Sequence[int], values: Sequence[Tensor], code: int, *, draws: bool) -> list[int]:
        """Measure a value at each of many sites, and take their rows; returns the places of those it could not measure."""
        first = self.make_room(len(values))
        refused = native.measure_many(self.memory, first, values, code)
        if refused:
            there = [i for i in range(len(values)) if i not in set(refused)]
            sites, values, rows = [sites[i] for i in there], [values[i] for i in there], self.rows[first:][there]
            self.rows[first:] = np.nan
            self.rows[first:][: len(there)] = rows
        counts = [0] * len(values)
        if draws:
            drawn = np.empty(DRAWN * len(values))
            counts = native.draw_many(drawn, values, DRAWN)
            with np.errstate(over="ignore"):  # float64 may hold more than float32
                self.numbers[self.drawn :][: sum(counts)] = drawn[: sum(counts)]
        self._take_all(sites, counts)
        return refused

    def put(self, sites: Sequence[int], counts: Sequence[int], squares: Sequence[float]) -> None:
        """Take sums of squares that are known already, one a site, each of so many numbers."""
        first = self.make_room(len(sites))
        rows = self.rows[first:][: len(sites)]
        rows[:, 1], rows[:, len(STATISTICS)] = squares, counts
        self._take_all(sites, [0] * len(sites))

    def _take_all(self, sites: Sequence[int], counts: Iterable[int]) -> None:
        """Take the next rows, one for each site, and with each as many drawn elements as are said."""
        first, self.used = self.used, self.used + len(sites)
        for count in counts:
            self.drawn += count
            self.ends.append(self.drawn)
        self.sites += sites
        self.at += range(first, self.used)

    def drop(self, sites: Collection[int]) -> None:
        """Forget what was measured at some sites; their rows stay and belong to none."""
        self.sites = [-1 if site in sites else site for site in self.sites]

    def spoiled(self) -> bool:
        """Whether a sum or a sum of squares is not finite; what was not measured is NaN in both."""
        return not np.isfinite(self.rows[: self.used, :2]).any(axis=1).all()

    def end(self) -> Part:
        """Hand over what was measured, and begin anew."""
        spans = np.zeros((self.used, 2), dtype=np.intp)
        spans[:, 1] = self.ends
        spans[1:, 0] = self.ends[:-1]
        part = Part(
            self.rows[: self.used].copy(),
            np.array(self.sites, dtype=np.int32),
            np.array(self.at, dtype=np.intp),
            self.numbers[: self.drawn].copy(),
            spans,
            self.active,
            self.saturations,
        )
        self.rows[: self.used] = np.nan
        self._begin()
        return part
