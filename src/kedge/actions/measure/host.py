"""The statistics of one step in this process's memory: a table of rows, and the sites of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kedge import native
from kedge.actions.measure import reduce
from kedge.actions.measure.reduce import STATISTICS
from kedge.actions.measure.saturation import Saturation
from kedge.native.reductions import flat
from kedge.store import exponents

_BLOCK = 256
"""The initial number of rows."""
_PLACES = 2
"""The places of sites for each row: one value may be at several sites."""
THERE = ("device", "row", "drawn", "active", "channels")
"""What is known of a value's rows in a `kedge.actions.measure.launched.LaunchedTable`; -1 for none.

They are the index of the device, the row of the statistics, the first rows of the histogram and of the bytes
that tell which channels are active, and the number of channels.
"""
_WHOLE = [STATISTICS.index(name) for name in ("nonzero", "nonfinite", "nan")]


class DevicePart(NamedTuple):
    """The measurements of one step on one device.

    Attributes:
        rows: One row for each measured value: its statistics, and its number of elements.
        sampled: The number of elements drawn from each value; -1 where none were.
        histograms: A histogram of the drawn elements of each value; see `kedge.store.exponents`.
        sites: The number of the site at each place; negative if the place was dropped.
        at: The row of the value at each place; a value at several sites is measured once.
        saturated: The number of saturated drawn elements at each place whose activation can
            saturate; else -1.
        active: One bit for each channel, whether it has a number above zero, by place; for some
            places only.
        there: For each row where its numbers are on a device, in columns as `THERE`.
    """

    rows: NDArray[np.float64]
    sampled: NDArray[np.int32]
    histograms: list[bytes]
    sites: NDArray[np.int32]
    at: NDArray[np.intp]
    saturated: NDArray[np.int32]
    active: dict[int, bytes]
    there: NDArray[np.int64] | None = None

    def columns(self) -> dict[str, Any]:
        """Return the columns of the recording, without dropped places."""
        chosen: slice | NDArray[np.intp] = slice(None)
        if (self.sites < 0).any():
            chosen = np.flatnonzero(self.sites >= 0)
        at = self.at[chosen]
        table = self.rows.T.take(at, axis=1)  # each column in one piece
        columns: dict[str, Any] = dict(zip(STATISTICS, table, strict=False))
        for i in _WHOLE:
            columns[STATISTICS[i]] = np.where(np.isnan(table[i]), -1, table[i]).astype(np.int64)
        columns["site"] = self.sites[chosen]
        columns["count"] = table[len(STATISTICS)].astype(np.int64)
        columns["active"] = [b""] * len(at)
        if self.active:
            places = np.arange(len(self.at))[chosen].tolist()
            columns["active"] = [self.active.get(place, b"") for place in places]
        columns["sampled"] = self.sampled[at]
        columns["saturated"] = self.saturated[chosen]
        columns["exponents"] = [self.histograms[row] for row in at.tolist()]
        return columns


class HostTable:
    """Rows of float64 in this process's memory, reused in the next step.

    Attributes:
        rows: One row for each value, as `kedge.native.measure_into` writes it.
        sampled: See `DevicePart`.
        buckets: The counts of each value's histogram.
        there: See `DevicePart`.
        sites: See `DevicePart`.
        at: See `DevicePart`.
        saturated: See `DevicePart`.
        counts: The numbers of rows and of places of sites in use.
        measurer: Measures values into all of these; None without the compiled part.
        observe: The measurer's way to measure one value.
        short_way: Makes functions that measure the values of one site; see Note [The short way] in
            `measurer.c`.
        open_step: Lets the values of a step go that way.
        saturating: The saturation of activations, by the number of the site.
        active: See `DevicePart`.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(2, dtype=np.int64)
        self.measurer: native.Measurer | None = None
        if native.Measurer is not None:
            self.measurer = native.Measurer()
        self.observe: Callable[..., int] = _refuse
        self.short_way: Callable[..., Callable[[Tensor, int, str], None]] = _only_the_long_way
        self.open_step: Callable[..., None] = _ignore
        if self.measurer is not None:
            self.observe = self.measurer.observe
            self.short_way = self.measurer.short_way
            self.open_step = self.measurer.open_step
        self.saturating: dict[int, Saturation] = {}
        self.active: dict[int, bytes] = {}
        self._allocate(_BLOCK)

    def _allocate(self, room: int) -> None:
        """Allocate room for a number of rows, and keep the present ones."""
        places = room * _PLACES
        self.rows = _longer(native.table(room), self, "rows")
        self.sampled = _longer(np.full(room, -1, dtype=np.int32), self, "sampled")
        counts = np.zeros((room, exponents.BUCKETS), dtype=np.uint16)
        self.buckets = _longer(counts, self, "buckets")
        there = np.full((room, len(THERE)), -1, dtype=np.int64)
        self.there = _longer(there, self, "there")
        self.sites = _longer(np.zeros(places, dtype=np.int32), self, "sites")
        self.at = _longer(np.zeros(places, dtype=np.int64), self, "at")
        self.saturated = _longer(np.full(places, -1, dtype=np.int32), self, "saturated")
        if self.measurer is not None:
            self.measurer.use_arrays(
                self.rows,
                self.sampled,
                self.buckets,
                self.there,
                self.sites,
                self.at,
                self.saturated,
                self.counts,
            )

    def saturates(self, site: int, saturation: Saturation) -> None:
        """Set how the activation at a site saturates."""
        self.saturating[site] = saturation
        if self.measurer is not None:
            self.measurer.saturates(site, saturation.low, saturation.high)

    def close_step(self) -> None:
        """Let no value go the short way; see Note [The short way] in `measurer.c`."""
        self.open_step(-1)

    @property
    def measured(self) -> int:
        """How many values went the short way, in all steps."""
        if self.measurer is None:
            return 0
        measured: int = self.measurer.measured
        return measured

    @property
    def used(self) -> int:
        """The number of rows in use."""
        return int(self.counts[0])

    def make_room(self, count: int) -> int:
        """Ensure room for `count` more rows and places; returns the index of the first free row."""
        self.close_step()
        used, places = self.counts.tolist()
        while used + count > len(self.rows) or places + count > len(self.sites):
            self._allocate(2 * len(self.rows))
        return int(used)

    def take(self, site: int) -> None:
        """Assign the next row, already written, to the value at a site."""
        row = self.used
        self.counts[0] += 1
        self.place(site, row)

    def place(self, site: int, row: int) -> None:
        """Assign a row to a site, at the next place."""
        places = int(self.counts[1])
        self.sites[places] = site
        self.at[places] = row
        self.counts[1] += 1

    def draw_for_last(self, value: Tensor) -> int:
        """Draw elements for the last measurement, from its value or the outputs that decide.

        Returns:
            The outcome, as flags of `kedge.native`.
        """
        done = native.REFUSED
        if self.measurer is not None:
            done = self.measurer.draw_for_last(value)
        if done != native.REFUSED or not value.is_cpu:
            return done
        row, place = self.counts.tolist()
        some = reduce.drawn(flat(value)).float().numpy()
        self.sampled[row - 1] = len(some)
        self.buckets[row - 1] = exponents.count_runs(some, np.array([[0, len(some)]]))[0]
        saturation = self.saturating.get(int(self.sites[place - 1]))
        if saturation is not None:
            self.saturated[place - 1] = saturation.count(some)
        return native.DONE

    def activate(self, value: Tensor, dim: int) -> None:
        """Record which channels of the last measured value are active: one bit for each."""
        active = native.channels_above_zero(value, dim)
        if active is None:
            active = bits(reduce.channels(value, dim).float().numpy())
        self.active[int(self.counts[1]) - 1] = active

    def observe_all(
        self, sites: Sequence[int], values: Sequence[Tensor], what: int, *, draws: bool
    ) -> Sequence[int]:
        """Measure a value at each of many sites.

        Returns:
            The indices of those that one native call could not measure.
        """
        self.make_room(len(values))
        if self.measurer is None:
            return range(len(values))
        refused: list[int] = self.measurer.observe_all(values, sites, what, draws)
        return refused

    def put(
        self,
        sites: Sequence[int],
        counts: Sequence[int],
        squares: Sequence[float],
    ) -> None:
        """Add known sums of squares, one a site, with the number of elements that each is of."""
        more = len(sites)
        first = self.make_room(more)
        rows = slice(first, first + more)
        self.rows[rows, STATISTICS.index("sumsq")] = squares
        self.rows[rows, len(STATISTICS)] = counts
        place = int(self.counts[1])
        places = slice(place, place + more)
        self.sites[places] = sites
        self.at[places] = range(first, first + more)
        self.counts += more

    def put_launched(self, site: int, count: int, device: int, there: int) -> None:
        """Add a value of a site whose statistics will be in a row of a device's table."""
        row = self.make_room(1)
        self.rows[row, len(STATISTICS)] = count
        self.there[row, :2] = device, there
        self.take(site)

    def drop(self, sites: Collection[int]) -> None:
        """Discard the measurements at some sites; their rows stay and belong to no site."""
        self.close_step()
        here = self.sites[: self.counts[1]]
        here[np.isin(here, list(sites))] = -1

    def withdraw(self, site: int) -> None:
        """Discard the last measurement at a site; its row stays and belongs to no site."""
        self.close_step()
        here = self.sites[: self.counts[1]]
        places = np.flatnonzero(here == site)
        here[places[-1:]] = -1

    def spoiled(self) -> bool:
        """Whether a row has neither a finite sum nor a finite sum of squares.

        An unmeasured row has NaN in both.
        """
        return not np.isfinite(self.rows[: self.used, :2]).any(axis=1).all()

    def end(self) -> DevicePart:
        """Return the measurements, and reset the table."""
        self.close_step()
        used, places = self.counts.tolist()
        part = DevicePart(
            self.rows[:used].copy(),
            self.sampled[:used].copy(),
            _encoded(self.buckets, used),
            self.sites[:places].copy(),
            self.at[:places].copy(),
            self.saturated[:places].copy(),
            self.active,
            _launched(self.there[:used]),
        )
        self.rows[:used] = np.nan
        self.there[:used] = -1
        self.sampled[:used] = -1
        self.buckets[:used] = 0
        self.saturated[:places] = -1
        self.counts[:] = 0
        self.active = {}
        if self.measurer is not None:
            self.measurer.forget()
        return part


def _launched(there: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return where the numbers of rows are on devices; None if all are here."""
    if (there[:, 0] < 0).all():
        return None
    return there.copy()


def _encoded(buckets: NDArray[np.uint16], rows: int) -> list[bytes]:
    """Return the histograms of the first rows."""
    if native.histograms is not None:
        return native.histograms(buckets, rows)
    return exponents.encode_all(buckets[:rows].astype(np.int64))


def _refuse(
    _value: Tensor, _site: int, _role: int, _what: int, _draws: bool, _dim: int = -1
) -> int:
    return native.REFUSED


def _only_the_long_way(
    _role: int,
    _is_gradient: bool,
    _is_under_jit: Callable[[], bool],
    measure: Callable[[Tensor, int, str, int], int | None],
) -> Callable[[Tensor, int, str], None]:
    def measure_value(value: Tensor, step: int, leaf: str = "") -> None:
        measure(value, step, leaf, native.REFUSED)

    return measure_value


def _ignore(*_args: int) -> None:
    """There is no short way."""


def _longer(fresh: NDArray[Any], table: HostTable, name: str) -> NDArray[Any]:
    """Return a new array that begins with the contents of the table's array of this name."""
    old = getattr(table, name, None)
    if old is not None:
        fresh[: len(old)] = old
    return fresh


def bits(maxima: Any) -> bytes:
    """Return one bit for each channel: whether its maximum is above zero."""
    if not len(maxima):
        return b""
    return np.packbits(maxima > 0).tobytes()
