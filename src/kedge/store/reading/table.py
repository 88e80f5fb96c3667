"""All rows of one rank, by site.

# Note [One table]
The rows of all sites stand in one table, site after site, and those of one site are a part of it.
So a rule can look at a column of the whole recording at once, and at the rows of a site only where
it found something: with tens of thousands of sites, a few calls of numpy for each of them would
take longer than the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.store.binary_column import joined
from kedge.store.columns import BINARY, COLUMNS, OFFSETS, Columns
from kedge.store.reading.by_site import FileRows, RowGroup, SortedRows
from kedge.store.rows import Bools, Ints, LazyRows, Rows, reduced


class StatsTable:
    """The rows of a recording, or of one rank's share of it.

    Args:
        columns: Rows in memory, in any order.
        parts: Rows of a file, in the order of writing.
    """

    def __init__(
        self,
        columns: Columns | None = None,
        parts: Sequence[FileRows] = (),
    ) -> None:
        self._loose = columns
        self.parts = tuple(parts)

    @cached_property
    def full_steps(self) -> Ints:
        """Every step with a full row, sorted."""
        return np.unique(_joined([group.full_steps for group in self._groups], np.int64))

    @cached_property
    def _groups(self) -> tuple[RowGroup, ...]:
        groups: list[RowGroup] = []
        if self._loose is not None:
            groups.append(SortedRows(self._loose))
        for part in self.parts:
            groups += part.groups
        return tuple(groups)

    def all(self, sites: int) -> SitesInOne:
        """Return the rows of the sites below a number, those of one step merged into one."""
        held = []
        for group in self._groups:
            where = group.where_all(sites)
            if where.start < where.stop:
                held.append((group, where))
        columns: Mapping[str, Any] = _LazyColumns(held)
        if not held:
            return SitesInOne(LazyRows(columns), np.zeros(sites + 1, dtype=np.int64))
        site = columns["site"]
        step = columns["step"]
        follows = (site[1:] > site[:-1]) | ((site[1:] == site[:-1]) & (step[1:] > step[:-1]))
        if not follows.all():
            columns = _Ordered(columns, np.lexsort((step, site)))
            site = columns["site"]
            step = columns["step"]
        first = np.append(True, (site[1:] != site[:-1]) | (step[1:] != step[:-1]))
        if first.all():
            return SitesInOne(LazyRows(columns), _borders(site, sites))
        starts = np.flatnonzero(first)
        return SitesInOne(reduced(columns, starts), _borders(site[starts], sites))


class SitesInOne:
    """The rows of all sites, one after the other; see Note [One table].

    Attributes:
        rows: The rows, by site and step.
        starts: The place of the first row of each site, and the number of rows at the end.
    """

    def __init__(self, rows: Rows, starts: Ints) -> None:
        self.rows = rows
        self.starts = starts
        self._borders: list[int] = starts.tolist()

    def of(self, site: int) -> Rows:
        """Return the rows of one site; none if the table has no such site."""
        return LazyRows(_Part(self.rows, self._where(site)))

    def part(self, values: NDArray[Any], site: int) -> NDArray[Any]:
        """Return those of one site of values of all rows."""
        return values[self._where(site)]

    def _where(self, site: int) -> slice:
        if not 0 <= site < len(self._borders) - 1:
            return slice(0, 0)
        return slice(self._borders[site], self._borders[site + 1])

    @cached_property
    def lengths(self) -> Ints:
        """The number of rows of each site."""
        return np.diff(self.starts)

    @cached_property
    def site(self) -> Ints:
        """The number of the site of each row."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def any(self, rows: Bools) -> Bools:
        """Return for each site whether something is true of any of its rows.

        Args:
            rows: Whether it is true of each row.
        """
        found = np.zeros(len(self.lengths), dtype=bool)
        found[self.site[rows]] = True
        return found

    def count(self, rows: Bools) -> Ints:
        """Return for each site of how many of its rows something is true.

        Args:
            rows: Whether it is true of each row.
        """
        return np.bincount(self.site[rows], minlength=len(self.lengths))


def one_after_another(parts: Sequence[Rows]) -> SitesInOne:
    """Return the rows of sites that were merged one by one, those of several ranks."""
    borders = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return SitesInOne(LazyRows(_Concatenated(parts)), borders)


def _borders(site: NDArray[Any], sites: int) -> Ints:
    """Return the place in an ordered column of sites at which each site begins.

    The number of rows stands at the end.
    """
    # Numbers of another type would make numpy convert the whole column first.
    return np.searchsorted(site, np.arange(sites + 1, dtype=site.dtype))


class _LazyColumns(dict[str, Any]):
    """The columns of several groups of rows, one after the other; each is read when needed."""

    def __init__(self, places: Sequence[tuple[RowGroup, slice]]) -> None:
        super().__init__()
        self._places = places

    def __missing__(self, name: str) -> Any:
        if name in BINARY:
            self[name] = joined([group.held(name, where) for group, where in self._places])
        else:
            parts = [group.column(name, where) for group, where in self._places]
            self[name] = _joined(parts, COLUMNS[name][0])
        return self[name]


class _Ordered(dict[str, Any]):
    """Columns in another order."""

    def __init__(self, columns: Mapping[str, Any], order: Ints) -> None:
        super().__init__()
        self._columns = columns
        self._order = order

    def __missing__(self, name: str) -> Any:
        column = self._columns[name]
        if name in BINARY:
            self[name] = column.chosen(self._order)
        else:
            self[name] = column[self._order]
        return self[name]


class _Concatenated(dict[str, Any]):
    """The columns of several rows, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        super().__init__()
        self._parts = parts

    def __missing__(self, name: str) -> Any:
        if name in BINARY:
            self[name] = joined([rows.held(name) for rows in self._parts])
        else:
            parts = [getattr(rows, name) for rows in self._parts]
            self[name] = _joined(parts, COLUMNS[name][0])
        return self[name]


class _Part(dict[str, Any]):
    """A part of each column of some rows."""

    def __init__(self, rows: Rows, where: slice) -> None:
        super().__init__()
        self._rows = rows
        self._where = where

    def __missing__(self, name: str) -> Any:
        if name in BINARY:
            return self._rows.held(name).chosen(self._where)
        return getattr(self._rows, name)[self._where]


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    if not parts:
        return np.zeros(0, dtype)
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts)


def tabulate(rows: Iterable[Mapping[str, Any]]) -> StatsTable:
    """Return a table of rows given one by one; a column left out of a row was not measured."""
    given = list(rows)
    columns: Columns = {}
    for name, (dtype, default) in COLUMNS.items():
        columns[name] = np.array([row.get(name, default) for row in given], dtype=dtype)
    for name in BINARY:
        held = [row.get(name, b"") for row in given]
        columns[name] = np.frombuffer(b"".join(held), dtype=np.uint8)
        columns[name + OFFSETS] = np.cumsum([0, *map(len, held)])
    return StatsTable(columns)
