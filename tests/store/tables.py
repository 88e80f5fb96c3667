"""The rows of files as tables, and their columns in the order of writing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kedge.store.columns import BINARY, COLUMNS, OFFSETS, Columns
from kedge.store.reading.batches import BatchFinder
from kedge.store.reading.by_site import FileRows, WrittenColumns
from kedge.store.reading.table import StatsTable


def read_table(path: Path) -> tuple[StatsTable, bool]:
    """Read the rows of a file up to its first incomplete batch, and say whether one was left out."""
    finder = BatchFinder(path)
    found = finder.find()
    return StatsTable(parts=[FileRows(found)] if found else []), finder.torn


def columns_of(*tables: StatsTable) -> Columns:
    """Read all rows of some tables of files, one after the other."""
    parts = [WrittenColumns(part.batches) for table in tables for part in table.parts]
    columns = {
        name: _joined([part[name] for part in parts], dtype) for name, (dtype, _) in COLUMNS.items()
    }
    for name in BINARY:
        columns[name] = _joined([part[name] for part in parts], np.uint8)
        lengths = _joined([np.diff(part[name + OFFSETS]) for part in parts], np.int64)
        columns[name + OFFSETS] = np.concatenate([[0], np.cumsum(lengths)])
    return columns


def _joined(parts: Iterable[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts])
