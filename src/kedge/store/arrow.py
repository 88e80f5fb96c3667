"""The statistics as an Arrow IPC stream: one record batch per written step.

A stream has no footer and nothing in it is ever changed, so a killed writer leaves a file that
reads up to its last whole batch, and another process can read it while it grows.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nanoarrow as na
import numpy as np
from nanoarrow.ipc import StreamWriter
from numpy.typing import NDArray

from kedge.store.batches import Finder
from kedge.store.columns import BINARY, COLUMNS, Columns
from kedge.store.disk import told, write_all
from kedge.store.stretch import Stretch
from kedge.store.table import Table

_TYPES = {name: getattr(na, np.dtype(dtype).name)() for name, (dtype, _) in COLUMNS.items()}
_SCHEMA = na.c_schema(na.struct({**_TYPES, **{name: na.binary() for name in BINARY}}))
_FIELDS = {field.name: field for field in _SCHEMA.children}
_LEAST_ROW = sum(np.dtype(dtype).itemsize for dtype, _ in COLUMNS.values()) + len(BINARY) * np.dtype(np.int32).itemsize

_CONTINUATION = b"\xff\xff\xff\xff"
_LONGEST_SCHEMA = 1 << 16


class StatsWriter:
    """Append the statistics of step after step to a new file.

    Each batch goes to the operating system in one unbuffered write, so that it outlives the
    process and others can see it at once.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        with told(f"start {self._path}"):
            self._file = io.FileIO(self._path, "x")
        self._size = 0
        self._pending = io.BytesIO()
        self._stream = StreamWriter.from_writable(self._pending)
        nothing = {name: np.zeros(0, dtype) for name, (dtype, _) in COLUMNS.items()}
        self._stream.write_array(_batch(nothing, {name: [] for name in BINARY}, 0))
        self._append()

    def write(self, step: int, columns: Mapping[str, Any]) -> None:
        """Append one batch.

        Args:
            step: The step all rows belong to.
            columns: The rows by column. ``site`` must be there; what is left out was not measured.
                ``active`` and ``exponents`` are sequences of bytes, one for each row.

        Raises:
            RecordingError: The file cannot take it, for one because the disk is full. The steps
                written before stay readable.
        """
        rows = len(columns["site"])
        numbers = {name: _column(name, columns, rows) for name in COLUMNS}
        numbers["step"] = np.full(rows, step, dtype=np.int64)
        binary: dict[str, Sequence[bytes]] = {name: columns.get(name, [b""] * rows) for name in BINARY}
        for name, held in binary.items():
            _require(name, len(held), rows)
        self._stream.write_array(_batch(numbers, binary, rows))
        self._append()

    def close(self) -> None:
        """End the stream; closing twice does nothing."""
        if self._file.closed:
            return
        self._stream.close()
        try:
            self._append()
        finally:
            self._file.close()

    def _append(self) -> None:
        content = self._pending.getvalue()
        self._pending.seek(0)
        self._pending.truncate()
        with told(f"write to {self._path}"):
            self._append_whole(content)
        self._size += len(content)

    def _append_whole(self, content: bytes) -> None:
        try:
            write_all(self._file, content)
        except OSError:
            # What follows a torn batch could never be read.
            self._file.truncate(self._size)
            self._file.seek(self._size)
            raise


def _column(name: str, columns: Mapping[str, Any], rows: int) -> NDArray[Any]:
    dtype, default = COLUMNS[name]
    if name not in columns:
        return np.full(rows, default, dtype=dtype)
    values = np.ascontiguousarray(columns[name], dtype=dtype)
    _require(name, len(values), rows)
    return values


def _require(name: str, found: int, rows: int) -> None:
    if found != rows:
        raise ValueError(f"column {name!r} has {found} values and column 'site' has {rows}; give one for each row")


def _batch(numbers: Mapping[str, NDArray[Any]], binary: Mapping[str, Sequence[bytes]], rows: int) -> Any:
    """Lay rows out as one Arrow struct array; the arrays are used as they are, without a copy."""
    children = [_array(_FIELDS[name], rows, numbers[name]) for name in COLUMNS]
    for name in BINARY:
        offsets = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(np.fromiter(map(len, binary[name]), np.int32, rows), out=offsets[1:])
        children.append(_array(_FIELDS[name], rows, offsets, b"".join(binary[name])))
    return na.c_array_from_buffers(
        _SCHEMA, rows, [None], null_count=0, children=children, validation_level="none", move=True
    )


def _array(field: Any, rows: int, *buffers: Any) -> Any:
    # The lengths are checked already, once for all buffers of a column.
    return na.c_array_from_buffers(field, rows, [None, *buffers], null_count=0, validation_level="none")


def read_table(path: str | os.PathLike[str]) -> tuple[Table, bool]:
    """Read the rows of a file, up to its first incomplete batch.

    Returns:
        The rows, and whether something incomplete was left out.

    Raises:
        NotARecording: The file holds something else.
    """
    finder = Finder(Path(path))
    found = finder.find()
    return Table(stretches=[Stretch(found)] if found else []), finder.torn


def read_stats(paths: Sequence[str | os.PathLike[str]]) -> tuple[Columns, bool]:
    """Read the columns of one or several files, as :func:`read_table` reads one."""
    parts = [read_table(path) for path in paths]
    table = Table(stretches=[stretch for part, _ in parts for stretch in part.stretches])
    return table.columns, any(torn for _, torn in parts)
