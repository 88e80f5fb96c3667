"""All rows of one rank, by site."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.store.binary_column import joined
from kedge.store.columns import BINARY, COLUMNS, OFFSETS, Columns
from kedge.store.reading.by_site import FileRows, RowGroup, SortedRows
from kedge.store.rows import Ints, Rows, merge


class StatsTable:
    """The rows of a recording, or of one rank's share of it.

    Args:
        columns: Rows in memory, in any order.
        parts: Rows of a file, in the order of writing.
    """

    def __init__(self, columns: Columns | None = None, parts: Sequence[FileRows] = ()) -> None:
        self._loose = columns
        self.parts = tuple(parts)

    @cached_property
    def full_steps(self) -> Ints:
        """Every step with a full row, sorted."""
        return np.unique(_joined([group.full_steps for group in self._groups], np.int64))

    @cached_property
    def _groups(self) -> tuple[RowGroup, ...]:
        loose: tuple[RowGroup, ...] = () if self._loose is None else (SortedRows(self._loose),)
        return (*loose, *chain.from_iterable(part.groups for part in self.parts))

    def rows(self, site: int) -> Rows:
        """Return the rows of one site, those of one step merged into one."""
        places = [(group, group.where(site)) for group in self._groups]
        found = _LazyColumns([(group, where) for group, where in places if where.start < where.stop])
        return merge(found)


class _LazyColumns(dict[str, Any]):
    """The columns of the rows of one site; each is read when first needed."""

    def __init__(self, places: Sequence[tuple[RowGroup, slice]]) -> None:
        super().__init__()
        self._places = places

    def __missing__(self, name: str) -> Any:
        if name in BINARY:
            self[name] = joined([group.held(name, where) for group, where in self._places])
        else:
            self[name] = _joined([group.column(name, where) for group, where in self._places], COLUMNS[name][0])
        return self[name]


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def tabulate(rows: Iterable[Mapping[str, Any]]) -> StatsTable:
    """Return a table of rows given one by one; a column left out of a row was not measured."""
    given = list(rows)
    columns: Columns = {
        name: np.array([row.get(name, default) for row in given], dtype=dtype)
        for name, (dtype, default) in COLUMNS.items()
    }
    for name in BINARY:
        held = [row.get(name, b"") for row in given]
        columns[name] = np.frombuffer(b"".join(held), dtype=np.uint8)
        columns[name + OFFSETS] = np.cumsum([0, *map(len, held)])
    return StatsTable(columns)
