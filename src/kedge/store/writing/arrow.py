"""The statistics as an Arrow IPC stream: one record batch per step that was measured in full.

A stream has no footer and is never changed, only appended to. So a file whose writer was killed
reads up to its last whole batch, and another process can read it while it grows.

# Note [Shared batches]
A light step has a row or two, and a batch of its own would take twenty times their size. So rows of
light steps wait and share a batch. It is written when a fully measured step or a non-finite value
arrives, when many rows wait, or when a row has waited for a second by the time the next one
arrives.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import accumulate, chain
from pathlib import Path
from time import monotonic
from typing import Any

import nanoarrow as na
import numpy as np
from nanoarrow.ipc import StreamWriter
from numpy.typing import NDArray

from kedge.files.atomic_write import told
from kedge.files.own_file import NEW, DescriptorTaken, OwnFile, write_all
from kedge.store.columns import BINARY, COLUMNS
from kedge.store.reading.batches import MARK, HeadLayout, layout_of
from kedge.store.rows import LIGHT

_TYPES = {name: getattr(na, np.dtype(dtype).name)() for name, (dtype, _) in COLUMNS.items()}
_SCHEMA = na.c_schema(na.struct({**_TYPES, **{name: na.binary() for name in BINARY}}))
_FIELDS = {field.name: field for field in _SCHEMA.children}

_GAPS = [bytes(size) for size in range(8)]
_LAYOUTS = 64
"""The layouts of batches that are remembered, one for each number of rows."""

_FEW = 8
"""The most rows of one light step that may wait."""
_MANY = 256
"""The most rows that share a batch."""
_PATIENCE = 1.0
"""The seconds that a row waits."""


class StatsWriter:
    """A new file, to which the statistics of each step are appended.

    Each batch is one write to the operating system, so that it outlives the process and
    other processes see it at once. Rows of light steps may wait; see Note [Shared batches].
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        with told(f"start {self._path}"):
            self._file = OwnFile(self._path, NEW)
        self._size = 0
        self._waiting: list[tuple[dict[str, NDArray[Any]], dict[str, Sequence[bytes]]]] = []
        self._since = 0.0
        self._pending = io.BytesIO()
        self._stream = StreamWriter.from_writable(self._pending)
        nothing = {name: np.zeros(0, dtype) for name, (dtype, _) in COLUMNS.items()}
        self._stream.write_array(_batch(nothing, {name: [] for name in BINARY}, 0))
        self._append_pending()

    def write(self, step: int, columns: Mapping[str, Any]) -> None:
        """Append the rows of a step, or of several.

        Args:
            step: The step that all rows belong to, unless there is a column ``step``.
            columns: The rows by column. ``site`` is required; a column left out was not measured.
                ``active`` and ``exponents`` are sequences of bytes, one for each row.

        Raises:
            RecordingError: The file cannot be written, for example because the disk is full.
                Earlier steps stay readable.
        """
        rows = len(columns["site"])
        numbers = {name: _column(name, columns, rows) for name in COLUMNS}
        if "step" not in columns:
            numbers["step"] = np.full(rows, step, dtype=np.int64)
        binary: dict[str, Sequence[bytes]] = {}
        for name in BINARY:
            binary[name] = columns.get(name, [b""] * rows)
            _require(name, len(binary[name]), rows)
        if not _may_wait(numbers):
            self.flush()
            self._write(numbers, binary)
            return
        if not self._waiting:
            self._since = monotonic()
        self._waiting.append((numbers, binary))
        if len(self._waiting) >= _MANY // _FEW or monotonic() - self._since > _PATIENCE:
            self.flush()

    def flush(self) -> None:
        """Append the waiting rows as one batch."""
        waiting = self._waiting
        self._waiting = []
        if not waiting:
            return
        numbers = {}
        for name in COLUMNS:
            numbers[name] = np.concatenate([each[name] for each, _ in waiting])
        binary = {}
        for name in BINARY:
            binary[name] = list(chain.from_iterable(each[name] for _, each in waiting))
        self._write(numbers, binary)

    def _write(
        self, numbers: Mapping[str, NDArray[Any]], binary: Mapping[str, Sequence[bytes]]
    ) -> None:
        self._append(_message(numbers, binary, len(numbers["site"])))

    def close(self) -> None:
        """End the stream. Closing twice has no effect."""
        if self._file.closed:
            return
        try:
            self.flush()
            self._stream.close()
            self._append_pending()
        finally:
            self._file.close()

    def _append_pending(self) -> None:
        """Append nanoarrow's output: the schema, and the end of the stream."""
        content = self._pending.getvalue()
        self._pending.seek(0)
        self._pending.truncate()
        self._append(content)

    def _append(self, content: bytes) -> None:
        with told(f"write to {self._path}"):
            self._append_whole(content)
        self._size += len(content)

    def _append_whole(self, content: bytes) -> None:
        try:
            write_all(self._file, content)
        except OSError:
            # Nothing after a torn batch could ever be read.
            with suppress(DescriptorTaken):  # then nothing was written
                self._file.cut(self._size)
            raise


def _may_wait(numbers: Mapping[str, NDArray[Any]]) -> bool:
    """Whether these are a few rows of a light step, all finite, so that nobody needs them at once."""
    if not 0 < len(numbers["site"]) <= _FEW or (numbers["level"] != LIGHT).any():
        return False
    return bool(np.isfinite(numbers["sumsq"]).all() and (numbers["nonfinite"] <= 0).all())


def _column(name: str, columns: Mapping[str, Any], rows: int) -> NDArray[Any]:
    dtype, default = COLUMNS[name]
    if name not in columns:
        return np.full(rows, default, dtype=dtype)
    values = np.ascontiguousarray(columns[name], dtype=dtype)
    _require(name, len(values), rows)
    return values


def _require(name: str, found: int, rows: int) -> None:
    if found != rows:
        raise ValueError(
            f"column {name!r} has {found} values and column 'site' has {rows}; "
            "give one for each row"
        )


def _batch(
    numbers: Mapping[str, NDArray[Any]],
    binary: Mapping[str, Sequence[bytes]],
    rows: int,
) -> Any:
    """Return rows as one Arrow struct array, without copying the columns."""
    children = [_array(_FIELDS[name], rows, numbers[name]) for name in COLUMNS]
    for name in BINARY:
        offsets = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(np.fromiter(map(len, binary[name]), np.int32, rows), out=offsets[1:])
        children.append(_array(_FIELDS[name], rows, offsets, b"".join(binary[name])))
    return na.c_array_from_buffers(
        _SCHEMA,
        rows,
        [None],
        null_count=0,
        children=children,
        validation_level="none",
        move=True,
    )


@cache
def _head() -> tuple[bytes, HeadLayout]:
    """Return the head of a batch as nanoarrow writes it.

    With it come the places of the numbers that differ from batch to batch.
    """
    one = {name: np.zeros(1, dtype) for name, (dtype, _) in COLUMNS.items()}
    batch = _batch(one, {name: [b"x"] for name in BINARY}, 1)
    whole = io.BytesIO()
    StreamWriter.from_writable(whole).write_array(batch)
    content = whole.getvalue()
    start = 8 + int.from_bytes(content[4:8], "little") + 8  # behind the schema and the mark
    metadata = content[start : start + int.from_bytes(content[start - 4 : start], "little")]
    return metadata, layout_of(metadata)


def _message(
    numbers: Mapping[str, NDArray[Any]],
    binary: Mapping[str, Sequence[bytes]],
    rows: int,
) -> bytes:
    """Return a batch as bytes: a copy of one head with other numbers.

    nanoarrow takes fifteen times as long.
    """
    known, gaps, at = _layout(rows)
    figures = list(known)
    body: list[Any] = []
    for name, gap in zip(COLUMNS, gaps, strict=True):
        body += (numbers[name].data, gap)
    for name in BINARY:
        held = binary[name]
        offsets = np.zeros(rows + 1, dtype=np.int32)
        if any(held):
            offsets[1:] = list(accumulate(map(len, held)))
        buffers = ((offsets.data, offsets.nbytes), (b"".join(held), int(offsets[-1])))
        for buffer, size in buffers:
            figures += (at, size)
            gap = _GAPS[-size % 8]
            body += (buffer, gap)
            at += size + len(gap)
        figures[-4:-4] = (figures[-4], 0)
    template, shape = _head()
    metadata = bytearray(template)
    shape.write(metadata, rows, at, figures)
    return b"".join([MARK, len(metadata).to_bytes(4, "little"), metadata, *body])


@lru_cache(maxsize=_LAYOUTS)
def _layout(rows: int) -> tuple[tuple[int, ...], tuple[bytes, ...], int]:
    """Return the places of the numeric columns in a batch of so many rows.

    With them come the padding after each, and their end.
    """
    figures: list[int] = []
    gaps = []
    at = 0
    for dtype, _ in COLUMNS.values():
        size = rows * np.dtype(dtype).itemsize
        figures += (at, 0, at, size)
        gaps.append(_GAPS[-size % 8])
        at += size + len(gaps[-1])
    return tuple(figures), tuple(gaps), at


def _array(field: Any, rows: int, *buffers: Any) -> Any:
    # The lengths were checked before, once for all buffers of a column.
    every = [None, *buffers]
    return na.c_array_from_buffers(field, rows, every, null_count=0, validation_level="none")
