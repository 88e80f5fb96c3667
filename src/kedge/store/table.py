"""All rows of a recording as columns, findable by site."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.store.rows import FULL, Ints, Rows, merge

#: The numeric columns in the order of the file, each with its type and the value a row has when none is given.
COLUMNS: dict[str, tuple[type[np.generic], float]] = {
    "step": (np.int64, 0),
    "site": (np.int32, 0),
    "calls": (np.int32, 1),
    "count": (np.int64, 0),
    "sum": (np.float64, np.nan),
    "sumsq": (np.float64, np.nan),
    "min": (np.float64, np.nan),
    "max": (np.float64, np.nan),
    "nonzero": (np.int64, -1),
    "nonfinite": (np.int64, -1),
    "level": (np.int8, FULL),
}
#: The binary column is held as one array of bytes and the ``n + 1`` places where its rows start and end.
ACTIVE = "active"
OFFSETS = "active.offsets"

Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of a recording in the order they were written."""

    columns: Columns

    def __len__(self) -> int:
        return len(self.columns["step"])

    @cached_property
    def full_steps(self) -> Ints:
        """Every step with a full row, sorted."""
        return np.unique(self.columns["step"][self.columns["level"] == FULL])

    @cached_property
    def _by_site(self) -> Ints:
        """Where the rows of each site are, site after site."""
        sites = self.columns["site"]
        # numpy sorts 16-bit integers by radix: 20 times faster than wider ones.
        narrow = len(sites) and sites.max() < np.iinfo(np.int16).max
        return np.argsort(sites.astype(np.int16) if narrow else sites, kind="stable")

    @cached_property
    def _bounds(self) -> Ints:
        sites = self.columns["site"]
        ids = np.arange((sites.max() if len(sites) else -1) + 2)
        return np.searchsorted(sites, ids, sorter=self._by_site)

    def rows(self, site: int) -> Rows:
        """Gather the rows of one site; those of one step are merged into one."""
        where = self._by_site[:0]
        if site + 1 < len(self._bounds):
            where = self._by_site[self._bounds[site] : self._bounds[site + 1]]
        numbers = {name: self.columns[name][where] for name in COLUMNS}
        return merge(numbers, self._bits(where))

    def _bits(self, where: Ints) -> list[bytes]:
        starts, ends = self.columns[OFFSETS][where], self.columns[OFFSETS][where + 1]
        if np.array_equal(starts, ends):
            return [b""] * len(where)
        data = self.columns[ACTIVE]
        return [data[start:end].tobytes() for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def tabulate(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Make a table of rows given one by one; what a row leaves out was not measured."""
    given = list(rows)
    columns: Columns = {
        name: np.array([row.get(name, default) for row in given], dtype=dtype)
        for name, (dtype, default) in COLUMNS.items()
    }
    bits = [row.get(ACTIVE, b"") for row in given]
    columns[ACTIVE] = np.frombuffer(b"".join(bits), dtype=np.uint8)
    columns[OFFSETS] = np.cumsum([0, *map(len, bits)])
    return Table(columns)
