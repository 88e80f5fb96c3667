"""The rows of a file in the order of sites, sorted when first needed.

# Note [Patterns]
The rows of one site are scattered over all batches. But most batches have the same sites in the
same order, so their rows are a matrix with a line for each batch, and transposing it puts the rows
of each site side by side: nothing is sorted. Only batches with a rare pattern of sites are sorted.
Each column is transposed when it is first needed; most are needed for a few sites, or never. A
column that is the same in every batch, such as the number of elements, is kept once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kedge.errors import NotARecording
from kedge.store.binary_column import BinaryColumn
from kedge.store.columns import COLUMNS, OFFSETS, Columns
from kedge.store.reading.batches import Batches
from kedge.store.rows import FULL, Ints

#: The most patterns of sites that get a matrix; the rows of other batches are sorted.
MOST_PATTERNS = 8
#: The batches transposed at a time: as many as stay in the processor's caches.
BLOCK = 64


class SortedRows:
    """Rows in any order, sorted by site."""

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        self._columns = columns
        self._ordered: Columns = {}

    def where_all(self, sites: int) -> slice:
        """Return the place of the rows of all sites with numbers below `sites`."""
        return _range(self.column("site", slice(None)), 0, sites)

    def column(self, name: str, where: slice) -> NDArray[Any]:
        """Return some rows of a numeric column."""
        if name not in self._ordered:
            self._ordered[name] = self._columns[name][self._order]
        return self._ordered[name][where]

    def held(self, name: str, where: slice) -> BinaryColumn:
        """Return some rows of a binary column."""
        rows = self._order[where]
        offsets = self._columns[name + OFFSETS]
        return BinaryColumn(self._columns[name], offsets[rows], offsets[rows + 1])

    @cached_property
    def full_steps(self) -> Ints:
        """Every step with a full row, sorted."""
        return np.unique(self._columns["step"][self._columns["level"] == FULL])

    @cached_property
    def _order(self) -> Ints:
        sites = self._columns["site"]
        # numpy sorts 16-bit integers by radix: 20 times faster than wider ones.
        limits = np.iinfo(np.int16)
        if len(sites) and limits.min <= sites.min() and sites.max() <= limits.max:
            sites = sites.astype(np.int16)
        return np.argsort(sites, kind="stable")


class MatrixRows:
    """The rows of batches with the same sites in the same order; see Note [Patterns]."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        sites = _part(batches, "site", 0)
        self._order = np.argsort(sites, kind="stable")
        self._sites = sites[self._order]
        self._ordered: Columns = {}

    def where_all(self, sites: int) -> slice:
        """Return the place of the rows of all sites with numbers below `sites`."""
        lines = _range(self._sites, 0, sites)
        return slice(lines.start * len(self._batches), lines.stop * len(self._batches))

    def column(self, name: str, where: slice) -> NDArray[Any]:
        """Return some rows of a numeric column."""
        return self._transposed(name)[self._lines(where)].reshape(-1)

    def _lines(self, where: slice) -> slice:
        return slice(where.start // len(self._batches), where.stop // len(self._batches))

    def held(self, name: str, where: slice) -> BinaryColumn:
        """Return some rows of a binary column."""
        memory = self._batches.memory
        if not self._batches.lengths[name].any():
            nothing = np.zeros(where.stop - where.start, dtype=np.int64)
            return BinaryColumn(memory, nothing, nothing)
        offsets = self._offsets(name)
        places = self._order[self._lines(where)]
        starts = self._batches.data[name] + offsets[places]
        ends = self._batches.data[name] + offsets[places + 1]
        return BinaryColumn(memory, starts.reshape(-1), ends.reshape(-1))

    @cached_property
    def full_steps(self) -> Ints:
        """Every step with a full row, sorted."""
        steps = self._transposed("step")
        full = self._transposed("level") == FULL
        # Usually all sites of a batch have its step, so few lines differ.
        starts = np.zeros(1, dtype=np.int64)
        if steps.strides[0] != 0 and len(steps) > 1:
            changes = (steps[1:] != steps[:-1]).any(axis=1)
            starts = np.flatnonzero(np.append(True, changes))
        somewhere = np.logical_or.reduceat(full, starts, axis=0)
        return np.unique(steps[starts][somewhere])

    def _transposed(self, name: str) -> NDArray[Any]:
        """Return a column as a matrix with one line for each site."""
        if name not in self._ordered:
            dtype = np.dtype(COLUMNS[name][0])
            if name == "step":
                column = self._one_a_batch(name)
            else:
                column = self._one_a_site(name, dtype)
            if column is None:
                column = self._transpose(name, dtype, self._order)
            self._ordered[name] = column
        return self._ordered[name]

    def _one_a_batch(self, name: str) -> NDArray[Any] | None:
        """Return a column that has one value in each batch; None if the sites of one differ."""
        values = np.empty(len(self._batches), COLUMNS[name][0])
        for i in range(len(values)):
            line = _part(self._batches, name, i)
            if (line != line[0]).any():
                return None
            values[i] = line[0]
        return np.broadcast_to(values, (len(self._order), len(values)))

    def _one_a_site(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """Return a column that is equal in all batches, as counts are; None if it differs."""
        if name not in self._batches.places:
            default = dtype.type(COLUMNS[name][1])
            return np.broadcast_to(default, (len(self._order), len(self._batches)))
        memory = self._batches.memory
        places = self._batches.places[name].tolist()
        width = len(self._order) * dtype.itemsize
        first = memory[places[0] : places[0] + width].tobytes()
        if any(memory[place : place + width].tobytes() != first for place in places):
            return None
        values = np.frombuffer(first, dtype)[self._order]
        return np.broadcast_to(values[:, None], (len(values), len(places)))

    def _offsets(self, name: str) -> NDArray[Any]:
        """Return the offsets of a binary column, one line for each place in a batch."""
        if name not in self._ordered:
            offsets = self._transpose(name, np.dtype(np.int32), np.arange(len(self._order) + 1))
            _must_fit(name, offsets, self._batches.lengths[name])
            self._ordered[name] = offsets
        return self._ordered[name]

    def _transpose(self, name: str, dtype: np.dtype[Any], lines: Ints) -> NDArray[Any]:
        memory = self._batches.memory
        places = self._batches.places[name].tolist()
        width = len(lines) * dtype.itemsize
        turned = np.empty((len(lines), len(places)), dtype)
        block = np.empty((BLOCK, len(lines)), dtype)
        straight = np.array_equal(lines, np.arange(len(lines)))
        for start in range(0, len(places), BLOCK):
            here = places[start : start + BLOCK]
            for line, place in zip(block, here, strict=False):
                line[:] = memory[place : place + width].view(dtype)
            held = block[: len(here)]
            if not straight:
                held = held[:, lines]
            turned[:, start : start + len(here)] = held.T
        return turned


RowGroup: TypeAlias = SortedRows | MatrixRows
"""Rows that can be read in the order of sites."""


class FileRows:
    """The rows of consecutive batches of one file."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return int(self.batches.rows.sum())

    @cached_property
    def groups(self) -> tuple[RowGroup, ...]:
        """The same rows, grouped by the pattern of sites in their batches."""
        batches = self.batches
        patterns: dict[bytes, list[int]] = {}
        for i, place in enumerate(batches.places["site"]):
            sites = batches.memory[place : place + 4 * batches.rows[i]]
            patterns.setdefault(sites.tobytes(), []).append(i)

        def rows(alike: list[int]) -> int:
            return len(alike) * int(batches.rows[alike[0]])

        groups: list[RowGroup] = []
        left = set(range(len(batches)))
        for alike in sorted(patterns.values(), key=rows, reverse=True)[:MOST_PATTERNS]:
            if len(alike) > 1 or len(patterns) == 1:
                groups.append(MatrixRows(batches.chosen(alike)))
                left -= set(alike)
        if left:
            groups.append(SortedRows(WrittenColumns(batches.chosen(sorted(left)))))
        return tuple(groups)


def _range(ordered: NDArray[Any], first: int, stop: int) -> slice:
    """Return the place of the numbers from one to before another in an ordered array."""
    # Numbers of another type would make numpy convert the whole array first.
    start, end = np.searchsorted(ordered, np.array([first, stop], dtype=ordered.dtype)).tolist()
    return slice(start, end)


class WrittenColumns(dict[str, NDArray[Any]]):
    """The columns of batches in the order of writing; each is read when first needed."""

    def __init__(self, batches: Batches) -> None:
        super().__init__()
        self._batches = batches

    def __missing__(self, name: str) -> NDArray[Any]:
        if name in COLUMNS:
            parts = [_part(self._batches, name, i) for i in range(len(self._batches))]
            nothing = np.zeros(0, COLUMNS[name][0])
            self[name] = np.concatenate([nothing, *parts])
        else:
            binary = name.removesuffix(OFFSETS)
            self[binary], self[binary + OFFSETS] = _bytes(self._batches, binary)
        return self[name]


def _part(batches: Batches, name: str, i: int) -> NDArray[Any]:
    """Return a column of one batch; all of it is not measured in a file that lacks the column."""
    dtype = np.dtype(COLUMNS[name][0])
    if name not in batches.places:
        return np.full(int(batches.rows[i]), COLUMNS[name][1], dtype)
    start = int(batches.places[name][i])
    return batches.memory[start : start + int(batches.rows[i]) * dtype.itemsize].view(dtype)


def _must_fit(name: str, offsets: NDArray[Any], lengths: Any) -> None:
    """Check that the rows of a binary column are inside its bytes, one after the other."""
    is_before = (offsets[0] < 0).any()
    is_behind = (offsets[-1] > lengths).any()
    if is_before or is_behind or (np.diff(offsets, axis=0) < 0).any():
        raise NotARecording(
            f"the recording is damaged: rows of {name!r} lie outside of their batch; "
            "copy the whole folder again, or record the run again"
        )


def _bytes(batches: Batches, binary: str) -> tuple[NDArray[np.uint8], Ints]:
    parts = [np.zeros(0, dtype=np.uint8)]
    offsets = [np.zeros(1, dtype=np.int64)]
    held = 0
    for i, rows in enumerate(batches.rows.tolist()):
        place = int(batches.places[binary][i])
        data = int(batches.data[binary][i])
        ends = batches.memory[place : place + 4 * (rows + 1)].view(np.int32).astype(np.int64)
        _must_fit(binary, ends, batches.lengths[binary][i])
        parts.append(batches.memory[data + int(ends[0]) : data + int(ends[-1])])
        offsets.append(ends[1:] - ends[0] + held)
        held += len(parts[-1])
    return np.concatenate(parts), np.concatenate(offsets)
