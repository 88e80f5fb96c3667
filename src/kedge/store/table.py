"""All rows of one file, findable by site."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.store.binary_column import joined
from kedge.store.by_site import Group, Sorted, Stretch
from kedge.store.columns import BINARY, COLUMNS, OFFSETS, Columns
from kedge.store.rows import Ints, Rows, merge

__all__ = ["BINARY", "COLUMNS", "OFFSETS", "Columns", "Table", "tabulate"]


class Table:
    """The rows of a recording, or of one rank's share of it.

    Args:
        columns: Rows that are held in memory, in any order.
        stretches: Rows of a file, in the order in which they were written.
    """

    def __init__(self, columns: Columns | None = None, stretches: Sequence[Stretch] = ()) -> None:
        self._loose = columns
        self.stretches = tuple(stretches)

    def __len__(self) -> int:
        loose = 0 if self._loose is None else len(self._loose["step"])
        return loose + sum(map(len, self.stretches))

    @property
    def columns(self) -> Columns:
        """All rows in the order in which they were written; they are copied each time this is asked for."""
        parts: list[Mapping[str, NDArray[Any]]] = [stretch.written for stretch in self.stretches]
        if self._loose is not None:
            parts.append(self._loose)
        columns = {name: _joined([part[name] for part in parts], dtype) for name, (dtype, _) in COLUMNS.items()}
        for name in BINARY:
            columns[name] = _joined([part[name] for part in parts], np.uint8)
            lengths = [np.diff(part[name + OFFSETS]) for part in parts]
            columns[name + OFFSETS] = np.concatenate([[0], np.cumsum(_joined(lengths, np.int64))])
        return columns

    @cached_property
    def full_steps(self) -> Ints:
        """Every step with a full row, sorted."""
        return np.unique(_joined([group.full_steps for group in self._groups], np.int64))

    @cached_property
    def _groups(self) -> tuple[Group, ...]:
        loose: tuple[Group, ...] = () if self._loose is None else (Sorted(self._loose),)
        return (*loose, *chain.from_iterable(stretch.groups for stretch in self.stretches))

    def rows(self, site: int) -> Rows:
        """Gather the rows of one site; those of one step are merged into one."""
        places = [(group, group.where(site)) for group in self._groups]
        found = _Gathered([(group, where) for group, where in places if where.start < where.stop])
        return merge(found)


class _Gathered(dict[str, Any]):
    """The columns of the rows of one site; each is gathered when it is first asked for."""

    def __init__(self, places: Sequence[tuple[Group, slice]]) -> None:
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


def tabulate(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Make a table of rows given one by one; what a row leaves out was not measured."""
    given = list(rows)
    columns: Columns = {
        name: np.array([row.get(name, default) for row in given], dtype=dtype)
        for name, (dtype, default) in COLUMNS.items()
    }
    for name in BINARY:
        held = [row.get(name, b"") for row in given]
        columns[name] = np.frombuffer(b"".join(held), dtype=np.uint8)
        columns[name + OFFSETS] = np.cumsum([0, *map(len, held)])
    return Table(columns)
