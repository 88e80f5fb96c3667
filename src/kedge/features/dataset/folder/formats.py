"""Shards and their checksums, the interface of their formats, and the format that is always there: safetensors.

A shard is written piece by piece, so that no shard is in memory twice, and its reading is that of
the package safetensors, which maps the file into memory.

# Note [Checksums]
A shard's description has the CRC-32 of each block of rows of each site, some 4 KiB of values, and
one of itself, which the index repeats. So a changed byte is found when it is read, wherever it is,
and a shard in the place of another one too. The values are summed up as they are read again, in
their own type; shape and type are compared, so a changed header is found as well. Reading a few
rows reads their whole blocks, so blocks are small. Earlier versions wrote larger blocks, or no
checksums.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from kedge.files.own_file import FRESH, OwnFile, write_all
from kedge.json_input.reading import open_regular, parse

#: Types that only PyTorch has; other formats store them as float32, which contains all their
#: numbers.
WIDENED = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Shard:
    """The contents of one file.

    Attributes:
        about: Its description, of JSON types: keys, places, skipped samples.
        columns: For each site its values, in consecutive pieces.
    """

    about: Mapping[str, Any]
    columns: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The number of samples with features."""
        return len(self.about["keys"])


class OpenValues(Protocol):
    """The values of a site in an open shard, as numbers of their `raw_type`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    #: All of them, if they are in memory, also as a mapped file.
    memory: NDArray[Any] | None

    def rows(self, first: int, last: int) -> NDArray[Any]:
        """Return consecutive rows."""


class OpenShard(Protocol):
    """A shard whose values can be read several times."""

    def values(self, site: str) -> OpenValues:
        """Return the values of a site."""


@dataclass(frozen=True)
class ValuesInMemory:
    """Values that are in memory, or in a mapped file.

    Attributes:
        dtype: Their type.
        memory: The values.
    """

    dtype: torch.dtype
    memory: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, samples first."""
        return self.memory.shape

    def rows(self, first: int, last: int) -> NDArray[Any]:
        """Return consecutive rows."""
        return self.memory[first:last]


class Format(Protocol):
    """Writing and reading of shards; a format has no state."""

    suffix: str
    #: Whether the types in `WIDENED` are stored as wider ones.
    widens: bool
    #: The number of shards of a data set that may be open.
    most_open: int

    def write(self, path: Path, shard: Shard) -> None:
        """Write a shard to a path that does not exist yet."""

    def about(self, path: Path) -> dict[str, Any]:
        """Return a shard's description, without reading its values."""

    def open(self, path: Path) -> OpenShard:
        """Open a shard for reading its values."""


def numpy_pieces(pieces: Sequence[Tensor]) -> list[Any]:
    """Return values as arrays; see `WIDENED`."""
    if pieces[0].dtype in WIDENED:
        pieces = [piece.float() for piece in pieces]
    return [piece.numpy() for piece in pieces]


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def as_written(values: Any, dtype: str) -> Tensor:
    """Return an array from a file as a tensor of the original dtype."""
    return torch.from_numpy(values).to(getattr(torch, dtype))


@cache
def raw_type(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's type for numbers of a dtype; for one that NumPy lacks, unsigned integers of the same width."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return np.dtype(f"u{dtype.itemsize}")


def as_raw(values: Tensor) -> NDArray[Any]:
    """Return a tensor on the CPU as an array of its `raw_type`, without a copy."""
    if values.dtype in WIDENED:
        values = values.view(getattr(torch, raw_type(values.dtype).name))
    array: NDArray[Any] = values.numpy()
    return array


def as_tensor(values: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return an array of a dtype's `raw_type` as a tensor, without a copy."""
    tensor = torch.from_numpy(values)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


class Safetensors:
    """A file for each shard, with the shard's description in the file's metadata, as JSON under the key kedge."""

    suffix = ".safetensors"
    widens = False
    most_open = 1024  # mapped files; a process may have 65,000

    def write(self, path: Path, shard: Shard) -> None:
        """Write a shard's header and values."""
        shapes = {}
        for name, pieces in shard.columns.items():
            shapes[name] = (shard.rows, *pieces[0].shape[1:])
        write_pieces(path, shard.columns, shapes, {"kedge": json.dumps(shard.about)})

    def about(self, path: Path) -> dict[str, Any]:
        """Return a shard's description."""
        open_regular(path).close()
        with safe_open(path, "np") as file:
            written = (file.metadata() or {})["kedge"]
        about: dict[str, Any] = parse(written.encode("utf-8", "surrogatepass"), exact=True)
        return about

    def open(self, path: Path) -> MappedShard:
        """Open a shard."""
        return MappedShard(path)


class MappedShard:
    """A file that is mapped into memory, without a file descriptor.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            self._sites = {site: file.get_tensor(site) for site in file.keys()}  # noqa: SIM118 - it is no mapping

    def values(self, site: str) -> ValuesInMemory:
        """Return the values of a site."""
        values = self._sites[site]
        return ValuesInMemory(values.dtype, as_raw(values))


_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_pieces(
    path: Path,
    pieces: Mapping[str, Sequence[Tensor]],
    shapes: Mapping[str, Sequence[int]],
    metadata: Mapping[str, str],
) -> None:
    """Write tensors, each given as consecutive pieces; wide numbers come first, which aligns every tensor to its width.

    The package would need each tensor whole, and does not say why a write failed.

    Raises:
        ValueError: A tensor is of a type that safetensors does not have.
    """
    names = sorted(pieces, key=lambda name: -pieces[name][0].element_size())
    head: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name in names:
        dtype = pieces[name][0].dtype
        if dtype not in _NAMES:
            raise ValueError(
                f"{name} is of {dtype}, which safetensors cannot hold; cast it in the "
                "site's transform"
            )
        end = at + sum(piece.nbytes for piece in pieces[name])
        head[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shapes[name]),
            "data_offsets": [at, end],
        }
        at = end
    header = json.dumps(head).encode()
    header += b" " * (-len(header) % 8)
    with OwnFile(path, FRESH) as file:
        write_all(file, struct.pack("<Q", len(header)) + header)
        for name in names:
            for piece in pieces[name]:
                if piece.numel():
                    write_all(file, bytes_in(piece))


def bytes_in(values: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU."""
    if not values.numel():
        return memoryview(b"")
    return values.contiguous().flatten().view(torch.uint8).numpy().data


FORMAT = Safetensors()


#: The approximate bytes of a block.
BLOCK = 1 << 12
#: The keys of a shard's description.
OWN, VALUES = "check", "checks"

REMEDY = "remove it and run the extraction again"


def checked(shard: Shard, *, widened: bool) -> Shard:
    """Return a shard with the checksums in its description.

    Args:
        shard: The shard.
        widened: Whether the format stores some types as wider ones, which may change the bits of a
            NaN.
    """
    sums = {}
    for name, pieces in shard.columns.items():
        row = pieces[0][:1].nbytes
        rows = max(1, BLOCK // max(row, 1))
        as_stored: Iterable[Tensor] = pieces
        if widened and pieces[0].dtype in WIDENED:
            as_stored = (piece.float().to(piece.dtype) for piece in pieces)
        sums[name] = {"rows": rows, "sums": list(_blocks(as_stored, rows))}
    about = {**shard.about, VALUES: sums}
    return Shard({**about, OWN: sum_of(about)}, shard.columns)


def sum_of(about: Mapping[str, Any]) -> int:
    """Return the checksum of a shard's description, without the formats' own keys."""
    own = {key: value for key, value in about.items() if key not in (OWN, "sites")}
    return zlib.crc32(json.dumps(own, sort_keys=True).encode())


def _blocks(pieces: Iterable[Tensor], rows: int) -> Iterator[int]:
    """Yield the checksum of each block of so many rows; the last one may have fewer."""
    total, left = 0, rows
    for piece in pieces:
        data = bytes_in(piece)
        width = len(data) // max(len(piece), 1)
        at = 0
        while at < len(piece):
            taken = min(left, len(piece) - at)
            total = zlib.crc32(data[at * width : (at + taken) * width], total)
            at += taken
            left -= taken
            if not left:
                yield total
                total, left = 0, rows
    if left < rows:
        yield total


def state_sum(pieces: Mapping[str, Tensor]) -> str:
    """Return the checksum of named tensors, as a text."""
    about: list[Any] = []
    sums: list[int] = []
    for name, tensor in sorted(pieces.items()):
        about.append([name, str(tensor.dtype), list(tensor.shape)])
        sums += _blocks([tensor.reshape(1, -1)], 1)
    return str(zlib.crc32(f"{json.dumps(about)} {sums}".encode()))
