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
from nanoarrow.ipc import InputStream, StreamWriter
from numpy.typing import NDArray

from kedge.errors import NotARecording
from kedge.store.disk import told, write_all
from kedge.store.table import ACTIVE, COLUMNS, OFFSETS, Columns

_TYPES = {name: getattr(na, np.dtype(dtype).name)() for name, (dtype, _) in COLUMNS.items()}
_SCHEMA = na.c_schema(na.struct({**_TYPES, ACTIVE: na.binary()}))
_FIELDS = {field.name: field for field in _SCHEMA.children}
_LEAST_ROW = sum(np.dtype(dtype).itemsize for dtype, _ in COLUMNS.values()) + np.dtype(np.int32).itemsize

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
        self._stream.write_array(_batch(nothing, []))
        self._append()

    def write(self, step: int, columns: Mapping[str, Any]) -> None:
        """Append one batch.

        Args:
            step: The step all rows belong to.
            columns: The rows by column. ``site`` must be there; what is left out was not measured.
                ``active`` is a sequence of bytes, one for each row.

        Raises:
            RecordingError: The file cannot take it, for one because the disk is full. The steps
                written before stay readable.
        """
        rows = len(columns["site"])
        numbers = {name: _column(name, columns, rows) for name in COLUMNS}
        numbers["step"] = np.full(rows, step, dtype=np.int64)
        active: Sequence[bytes] = columns.get(ACTIVE, [b""] * rows)
        _require(ACTIVE, len(active), rows)
        self._stream.write_array(_batch(numbers, active))
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


def _batch(numbers: Mapping[str, NDArray[Any]], active: Sequence[bytes]) -> Any:
    """Lay rows out as one Arrow struct array; the arrays are used as they are, without a copy."""
    rows = len(active)
    offsets = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, active), np.int32, rows), out=offsets[1:])
    children = [_array(_FIELDS[name], rows, numbers[name]) for name in COLUMNS]
    children.append(_array(_FIELDS[ACTIVE], rows, offsets, b"".join(active)))
    return na.c_array_from_buffers(
        _SCHEMA, rows, [None], null_count=0, children=children, validation_level="none", move=True
    )


def _array(field: Any, rows: int, *buffers: Any) -> Any:
    # The lengths are checked already, once for all buffers of a column.
    return na.c_array_from_buffers(field, rows, [None, *buffers], null_count=0, validation_level="none")


def read_stats(paths: Sequence[str | os.PathLike[str]]) -> tuple[Columns, bool]:
    """Read the rows of one or several files, up to the first incomplete batch of each.

    Returns:
        The columns, and whether something incomplete was left out.

    Raises:
        NotARecording: A file holds something else.
    """
    parts = [_read(Path(path)) for path in paths]
    return _joined([columns for columns, _ in parts]), any(torn for _, torn in parts)


def _read(path: Path) -> tuple[Columns, bool]:
    with told(f"read {path}"), io.FileIO(path) as file:
        # The writer may append meanwhile: what counts is what was there at the start.
        size = os.fstat(file.fileno()).st_size
        reader = _Reader(size)
        if _stopped_in_schema(file, size):
            return reader.columns(), size > 0
        try:
            whole = reader.read(file)
        except _ForeignFileError as error:
            raise NotARecording(f"{path} does not hold the statistics of a recording: {error}") from error
        return reader.columns(), not whole or file.tell() < size


def _stopped_in_schema(file: io.FileIO, size: int) -> bool:
    """Tell whether the writer was stopped within the first message of the stream."""
    start = file.read(8)
    file.seek(0)
    if len(start) < 8:
        return _CONTINUATION.startswith(start[:4])
    length = int.from_bytes(start[4:], "little")
    return start[:4] == _CONTINUATION and size < 8 + length <= _LONGEST_SCHEMA


class _ForeignFileError(Exception):
    """A file does not start as the statistics of a recording do."""


class _Reader:
    """Columns that are filled batch by batch.

    They are allocated once: the size of the file bounds the number of rows, and memory that is
    never touched costs nothing.
    """

    def __init__(self, size: int) -> None:
        most = size // _LEAST_ROW
        self._numbers = {name: np.empty(most, dtype) for name, (dtype, _) in COLUMNS.items()}
        self._offsets = np.zeros(most + 1, dtype=np.int64)
        self._active = bytearray()
        self._rows = 0

    def read(self, file: io.FileIO) -> bool:
        """Take batches in until the end, or until one cannot be read; tell which it was."""
        with InputStream.from_readable(file) as source:
            try:
                stream = na.c_array_stream(source)
                places = _places(stream.get_schema())
            except RuntimeError as error:
                raise _ForeignFileError(f"it is not an Arrow stream ({error})") from error
            with stream:
                return self._take_all(stream, places)

    def columns(self) -> Columns:
        """Give what was read."""
        columns: Columns = {name: values[: self._rows] for name, values in self._numbers.items()}
        columns[ACTIVE] = np.frombuffer(bytes(self._active), dtype=np.uint8)
        columns[OFFSETS] = self._offsets[: self._rows + 1]
        return columns

    def _take_all(self, stream: Any, places: Mapping[str, int]) -> bool:
        try:
            for batch in stream:
                self._take(batch.view(), places)
        except (RuntimeError, ValueError):
            # Torn by a kill, or being written at this moment: the end of what can be read.
            return False
        return True

    def _take(self, batch: Any, places: Mapping[str, int]) -> None:
        start, end = self._rows, self._rows + batch.length
        for name, values in self._numbers.items():
            values[start:end] = batch.child(places[name]).buffer(1)
        bits = batch.child(places[ACTIVE])
        ends = np.asarray(bits.buffer(1))[1:]
        self._offsets[start + 1 : end + 1] = ends + len(self._active)
        self._active += memoryview(bits.buffer(2))[: ends[-1] if len(ends) else 0]
        self._rows = end


def _places(schema: Any) -> dict[str, int]:
    """Find the columns of a recording among those of a file."""
    found = {field.name: (place, field.format) for place, field in enumerate(schema.children)}
    for name, field in _FIELDS.items():
        if name not in found:
            raise _ForeignFileError(f"it has no column {name!r} but {', '.join(found) or 'no column at all'}")
        if found[name][1] != field.format:
            raise _ForeignFileError(f"its column {name!r} has the Arrow type {found[name][1]!r}, not {field.format!r}")
    return {name: found[name][0] for name in _FIELDS}


def _joined(parts: Sequence[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    parts = parts or [_Reader(0).columns()]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in (*COLUMNS, ACTIVE)}
    starts = np.cumsum([0, *(len(part[ACTIVE]) for part in parts)])
    shifted = [part[OFFSETS][1:] + start for part, start in zip(parts, starts[:-1], strict=True)]
    columns[OFFSETS] = np.concatenate([[0], *shifted])
    return columns
