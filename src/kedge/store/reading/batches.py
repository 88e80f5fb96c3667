"""The places of the whole batches in a growing Arrow IPC stream, read from their heads alone.

# Note [Batches]
A message of a stream is a mark, the length of its metadata, the metadata (a flatbuffer), and a
body. The metadata of a batch has its number of rows, the length of its body, and the place of each
buffer of each column in the body. So the batches of a file are found by hopping from head to head.
Their columns are read later, one by one, from the file mapped into memory; a column that is never
asked for is never read.

A batch counts once all of it is there. Reading ends at a head that promises more than the file
holds, or that is not valid; the writer leaves at most one such batch, at the end. It never changes
earlier batches, so their places stay valid while the file grows, and also after the recording is
removed or replaced: a mapped file exists as long as it is read.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import nanoarrow as na
import numpy as np
from nanoarrow.ipc import InputStream
from numpy.typing import NDArray

from kedge.errors import NotARecording
from kedge.files.atomic_write import told
from kedge.json_input.reading import BadJson, open_regular
from kedge.store.columns import BINARY, COLUMNS, LATER
from kedge.store.reading.json_files import damaged

MARK = b"\xff\xff\xff\xff"
_HEAD = 8
_LONGEST_SCHEMA = 1 << 16
_BATCH_MESSAGE = 3
#: The most different heads that are remembered.
MOST_HEADS = 64

_FORMATS = {"int8": "c", "int32": "i", "int64": "l", "float64": "g"}
#: The columns of a recording, each with its Arrow type.
TYPES: dict[str, str] = {
    **{name: _FORMATS[np.dtype(dtype).name] for name, (dtype, _) in COLUMNS.items()},
    **dict.fromkeys(BINARY, "z"),
}
_TEXT = {"z", "u"}
_FIXED = set("cCsSiIlLefgb")

Places = NDArray[np.int64]


class ForeignFileError(Exception):
    """A file that does not start like the statistics of a recording."""


@dataclass(frozen=True)
class Batches:
    """Consecutive batches of one file.

    Attributes:
        memory: The file's content, from its beginning.
        rows: The number of rows of each batch.
        places: The start of each column of each batch, by the column's name; of a binary column the
            start of its offsets. A column that this file lacks, see `kedge.store.columns.LATER`,
            has none.
        data: The start of the bytes of each binary column.
        lengths: The number of those bytes.
    """

    memory: NDArray[np.uint8]
    rows: Places
    places: Mapping[str, Places]
    data: Mapping[str, Places]
    lengths: Mapping[str, Places]

    def __len__(self) -> int:
        return len(self.rows)

    def chosen(self, which: Sequence[int]) -> Batches:
        """Return some of the batches."""
        return Batches(
            memory=self.memory,
            rows=self.rows[which],
            places={name: places[which] for name, places in self.places.items()},
            data={name: places[which] for name, places in self.data.items()},
            lengths={name: lengths[which] for name, lengths in self.lengths.items()},
        )

    def followed_by(self, later: Batches) -> Batches:
        """Return these batches and later ones of the same file."""
        return Batches(
            memory=later.memory,
            rows=np.concatenate([self.rows, later.rows]),
            places=_followed(self.places, later.places),
            data=_followed(self.data, later.data),
            lengths=_followed(self.lengths, later.lengths),
        )


def _followed(
    earlier: Mapping[str, Places],
    later: Mapping[str, Places],
) -> dict[str, Places]:
    return {name: np.concatenate([earlier[name], later[name]]) for name in earlier}


def _opened(path: Path) -> io.FileIO:
    try:
        return open_regular(path)
    except BadJson as error:
        raise damaged(path, str(error)) from error


class BatchFinder:
    """A reader of one growing file that finds each of its batches once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = False
        self._layout: _Layout | None = None
        self._at = 0

    def find(self) -> Batches | None:
        """Return the whole batches appended since the last call; None if there are none.

        Afterwards ``torn`` says whether an incomplete batch follows them.

        Raises:
            NotARecording: The file holds something else.
        """
        with told(f"read {self.path}"), _opened(self.path) as file:
            # The writer may append meanwhile: only what was there at the start is read.
            size = os.fstat(file.fileno()).st_size
            if size == self._at:
                self.torn = False
                return None
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        try:
            return self._search(memory, size)
        except ForeignFileError as error:
            raise NotARecording(
                f"{self.path} does not hold the statistics of a recording: {error}"
            ) from error

    def _search(self, memory: mmap.mmap, size: int) -> Batches | None:
        if self._layout is None:
            if _stopped_in_schema(memory, size):
                self.torn = True
                return None
            self._at, self._layout = _schema(memory, size)
        heads = _Heads(self._layout.total)
        found, self._at, whole = _hop(memory, self._at, size, heads)
        self.torn = not whole
        batches = self._layout.batches(np.frombuffer(memory, np.uint8), found, heads)
        if len(batches) < len(found):
            self._at = found[len(batches)].head
            self.torn = True
        if not len(batches):
            return None
        return batches


@dataclass(frozen=True)
class _Layout:
    """The buffers of a batch that belong to each column of a recording."""

    buffers: Mapping[str, int]
    total: int

    def batches(
        self,
        memory: NDArray[np.uint8],
        found: Sequence[_Found],
        heads: _Heads,
    ) -> Batches:
        """Return the batches found, up to the first one whose buffers do not fit into it."""
        said = np.array(heads.buffers, dtype=np.int64).reshape(len(heads.buffers), self.total, 2)
        rows = np.array(heads.rows, dtype=np.int64)
        fits = self._fit(said, rows, np.array(heads.bodies, dtype=np.int64))
        which = np.array([one.said for one in found], dtype=np.int64)
        starts = np.array([one.start for one in found], dtype=np.int64)
        if not fits[which].all():
            many = int(np.argmin(fits[which]))
            which = which[:many]
            starts = starts[:many]

        places = {name: starts + said[which, at, 0] for name, at in self.buffers.items()}
        data = {}
        lengths = {}
        for name in BINARY:
            at = self.buffers[name] + 1
            data[name] = starts + said[which, at, 0]
            lengths[name] = said[which, at, 1]
        return Batches(memory, rows[which], places, data, lengths)

    def _fit(self, said: Places, rows: Places, bodies: Places) -> NDArray[np.bool_]:
        """Whether the buffers that each head describes are possible."""
        # A row has at least a byte in the body; without these bounds the products below could be
        # too large to count.
        fits = (rows >= 0) & (rows <= bodies)
        rows = np.where(fits, rows, 0)
        for name, place in self.buffers.items():
            used = [place]
            if name in BINARY:  # the offsets, one more than there are rows, and the bytes
                used.append(place + 1)
                least = np.where(rows > 0, 4 * (rows + 1), 0)
            else:
                least = np.dtype(COLUMNS[name][0]).itemsize * rows
            fits &= said[:, place, 1] >= least
            for buffer in used:
                start, length = said[:, buffer].T
                fits &= (start >= 0) & (length >= 0)
                fits &= (start <= bodies) & (length <= bodies - start)
        return fits


class _Found(NamedTuple):
    """A batch: the places of its head and its body, and the number of its kind of head."""

    head: int
    start: int
    said: int


class _Heads:
    """The different heads of batches: length of the body, rows, start and length of each buffer.

    The heads of most batches are equal, byte for byte, and each is read once.
    """

    def __init__(self, total: int) -> None:
        self.bodies: list[int] = []
        self.rows: list[int] = []
        self.buffers: list[tuple[int, ...]] = []
        self._total = total
        self._known: dict[bytes, int] = {}
        self._shapes: dict[int, HeadLayout] = {}

    def read(self, metadata: bytes) -> int:
        """Return the number of a head, which is read if it is new.

        Raises:
            ValueError: It is not a valid head of a batch; also struct.error or IndexError.
        """
        known = self._known.get(metadata)
        if known is not None:
            return known
        shape = self._shapes.get(len(metadata))
        if shape is None or not shape.fits(metadata):
            shape = layout_of(metadata)
            self._shapes[len(metadata)] = shape
        body, rows, buffers = shape.read(metadata)
        if body < 0 or len(buffers) != 2 * self._total:
            raise ValueError("a batch of other columns, or of a negative length")
        if len(self._known) == MOST_HEADS:
            self._known.clear()
        number = len(self.rows)
        self._known[metadata] = number
        self.bodies.append(body)
        self.rows.append(rows)
        self.buffers.append(buffers)
        return number


def _hop(
    memory: mmap.mmap,
    at: int,
    size: int,
    heads: _Heads,
) -> tuple[list[_Found], int, bool]:
    """Go from head to head.

    Returns:
        The batches, the place after the last whole one, and whether the file ends there.
    """
    found: list[_Found] = []
    while at < size:
        if memory[at : at + 4] != MARK or at + _HEAD > size:
            return found, at, False
        length = int.from_bytes(memory[at + 4 : at + _HEAD], "little")
        if not length:
            # The end of the stream, which nothing can follow.
            return found, at, at + _HEAD == size
        start = at + _HEAD + length
        if start > size:
            return found, at, False
        try:
            said = heads.read(memory[at + _HEAD : start])
        except (struct.error, ValueError, IndexError):
            return found, at, False
        end = start + heads.bodies[said]
        if end > size:
            return found, at, False
        if heads.rows[said]:
            found.append(_Found(at, start, said))
        at = end
    return found, at, True


@dataclass(frozen=True)
class HeadLayout:
    """The places of the numbers in the metadata of a batch.

    A place is 0 for a number left out because it is zero. A writer lays out all batches alike. So
    the metadata is parsed once, and again only if it differs in more than these numbers.
    """

    body: int
    rows: int
    nodes: int
    buffers: int
    unpacked: struct.Struct
    rest: Sequence[tuple[int, int, bytes]]

    def fits(self, metadata: bytes) -> bool:
        """Whether other metadata of this length differs in its numbers only."""
        return all(metadata[start:end] == expected for start, end, expected in self.rest)

    def write(
        self,
        metadata: bytearray,
        rows: int,
        body: int,
        buffers: Sequence[int],
    ) -> None:
        """Write other numbers: the rows, the body's length, and start and length of each buffer."""
        struct.pack_into("<q", metadata, self.body, body)
        struct.pack_into("<q", metadata, self.rows, rows)
        columns = len(COLUMNS) + len(BINARY)
        struct.pack_into(f"<{2 * columns}q", metadata, self.nodes, *((rows, 0) * columns))
        self.unpacked.pack_into(metadata, self.buffers, *buffers)

    def read(self, metadata: bytes) -> tuple[int, int, tuple[int, ...]]:
        """Return the length of the body, the rows, and start and length of each buffer."""
        body = 0
        if self.body:
            (body,) = _INT64.unpack_from(metadata, self.body)
        rows = 0
        if self.rows:
            (rows,) = _INT64.unpack_from(metadata, self.rows)
        return body, rows, self.unpacked.unpack_from(metadata, self.buffers)


def layout_of(metadata: bytes) -> HeadLayout:
    """Return the layout of the metadata of a batch.

    Raises:
        ValueError: It is not valid metadata of a batch; also struct.error or IndexError.
    """
    message = _offset(metadata, 0)
    kind = _field(metadata, message, 1)
    head = _field(metadata, message, 2)
    body = _field(metadata, message, 3)
    if not (kind and head) or metadata[kind] != _BATCH_MESSAGE:
        raise ValueError("not a batch")
    batch = _offset(metadata, head)
    rows, nodes, buffers, compressed = (_field(metadata, batch, i) for i in range(4))
    if not (nodes and buffers) or compressed:
        raise ValueError("a batch without columns, or a compressed one")
    first, last = _vector(metadata, buffers)
    columns = _vector(metadata, nodes)
    changing = [(first, last), columns]
    changing += [(at, at + 8) for at in (body, rows) if at]
    rest = []
    before = 0
    for start, end in sorted(changing):
        rest.append((before, start, metadata[before:start]))
        before = end
    rest.append((before, len(metadata), metadata[before:]))
    unpacked = struct.Struct(f"<{(last - first) // 8}q")
    return HeadLayout(body, rows, columns[0], first, unpacked, rest)


_UINT16 = struct.Struct("<H")
_INT32 = struct.Struct("<i")
_UINT32 = struct.Struct("<I")
_INT64 = struct.Struct("<q")


def _offset(metadata: bytes, at: int) -> int:
    """Return the target of an offset in a flatbuffer, which counts from its own place."""
    return at + int(_UINT32.unpack_from(metadata, at)[0])


def _vector(metadata: bytes, at: int) -> tuple[int, int]:
    """Return the start and the end of a vector of pairs of 64-bit integers."""
    vector = _offset(metadata, at)
    end = vector + 4 + 16 * int(_UINT32.unpack_from(metadata, vector)[0])
    if end > len(metadata):
        raise ValueError("a vector is longer than the metadata")
    return vector + 4, end


def _field(metadata: bytes, table: int, number: int) -> int:
    """Return the place of a field of a flatbuffer's table; 0 if it is left out."""
    entries = table - int(_INT32.unpack_from(metadata, table)[0])
    if entries < 0 or 4 + 2 * number >= int(_UINT16.unpack_from(metadata, entries)[0]):
        return 0
    place = int(_UINT16.unpack_from(metadata, entries + 4 + 2 * number)[0])
    if not place:
        return 0
    return table + place


def _stopped_in_schema(memory: mmap.mmap, size: int) -> bool:
    """Whether the writer was stopped within the first message of the stream."""
    if size < _HEAD:
        return MARK.startswith(memory[:4])
    length = int.from_bytes(memory[4:_HEAD], "little")
    return memory[:4] == MARK and size < _HEAD + length <= _LONGEST_SCHEMA


def _schema(memory: mmap.mmap, size: int) -> tuple[int, _Layout]:
    """Return the start of the batches and their layout, from the first message of a stream."""
    end = _HEAD + int.from_bytes(memory[4:_HEAD], "little")
    if memory[:4] != MARK or end > size:
        raise ForeignFileError("it is not an Arrow stream")
    with InputStream.from_readable(io.BytesIO(memory[:end])) as source:
        try:
            stream = na.c_array_stream(source)
            schema = stream.get_schema()
        except RuntimeError as error:
            raise ForeignFileError(f"it is not an Arrow stream ({error})") from error
        with stream:
            return end, _laid_out(schema)


def _laid_out(schema: Any) -> _Layout:
    """Return the places of a recording's columns among those of a file."""
    found: dict[str, tuple[int, str]] = {}
    total = 0
    for field in schema.children:
        found[field.name] = (total + 1, field.format)
        total += _buffers(field)
    places = {}
    for name, kind in TYPES.items():
        if name not in found and name in LATER:
            continue
        if name not in found:
            columns = ", ".join(found) or "no column at all"
            raise ForeignFileError(f"it has no column {name!r} but {columns}")
        places[name], there = found[name]
        if there != kind:
            raise ForeignFileError(
                f"its column {name!r} has the Arrow type {there!r}, not {kind!r}"
            )
    return _Layout(places, total)


def _buffers(field: Any) -> int:
    """Return the number of buffers of a column, which a later version may have added."""
    kind = field.format
    inner = sum(map(_buffers, field.children))
    if field.dictionary is None:
        if kind in _TEXT | {"Z", "U"}:
            return 3
        if kind in _FIXED or kind[:2] in ("w:", "d:", "td", "tt", "ts", "tD", "ti"):
            return 2
        if kind in ("+l", "+L", "+m"):
            return 2 + inner
        if kind == "+s" or kind.startswith("+w"):
            return 1 + inner
    raise ForeignFileError(
        f"its column {field.name!r} has the Arrow type {kind!r}, which cannot be skipped"
    )
