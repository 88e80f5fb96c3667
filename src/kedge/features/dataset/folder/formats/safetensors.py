"""Shards as safetensors files, written piece by piece so that no shard is in memory twice."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.features.dataset.folder.formats.format import Shard, ValuesInMemory, raw_type
from kedge.files.own_file import FRESH, OwnFile, write_all
from kedge.json_input.reading import MOST_BYTES, open_regular, parse
from kedge.json_input.shape import count, fields, list_of, mapping, mapping_of, text

_SITE = fields({"dtype": text, "shape": list_of(count), "data_offsets": list_of(count, 2)})
_METADATA = fields({"__metadata__": fields({"kedge": text})})
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
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


class Safetensors:
    """A file for each shard, with the shard's description in the file's metadata, as JSON under the key kedge."""

    suffix = ".safetensors"
    widens = False
    most_open = 1024  # mapped files; a process may have 65,000

    def write(self, path: Path, shard: Shard) -> None:
        """Write a shard's header and values."""
        shapes = {
            name: (shard.rows, *pieces[0].shape[1:]) for name, pieces in shard.columns.items()
        }
        write_pieces(path, shard.columns, shapes, {"kedge": json.dumps(shard.about)})

    def about(self, path: Path) -> dict[str, Any]:
        """Return a shard's description."""
        header, start = _read_header(path)
        _METADATA(header)
        written: str = header.pop("__metadata__")["kedge"]
        mapping_of(_SITE)(header)
        about: dict[str, Any] = parse(written.encode("utf-8", "surrogatepass"), exact=True)
        sites = {
            name: [one["dtype"], one["shape"], [start + at for at in one["data_offsets"]]]
            for name, one in header.items()
        }
        return {**about, "sites": sites}

    def open(self, path: Path, sites: Mapping[str, Any]) -> MappedShard:
        """Open a shard."""
        return MappedShard(path, sites)


class MappedShard:
    """A file that is mapped into memory, without a file descriptor.

    Args:
        path: The file.
        sites: For each site the name of its type, its shape, and where in the file its values are.
    """

    def __init__(self, path: Path, sites: Mapping[str, Any]) -> None:
        self._sites = sites
        mapped = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(mapped).numpy()  # type: ignore[arg-type]

    def values(self, site: str) -> ValuesInMemory:
        """Return the values of a site.

        Raises:
            ValueError: They are not as described, or the file is too short.
        """
        kind, shape, (first, last) = self._sites[site]
        dtype = _TYPES.get(kind)
        if dtype is None or last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"its header describes {site!r} as {kind} of the shape {shape} in {last - first:,} bytes"
            )
        if last > len(self._bytes):
            raise ValueError(
                f"{site!r} ends at byte {last:,} of {len(self._bytes):,}: the file was cut off"
            )
        return ValuesInMemory(dtype, self._bytes[first:last].view(raw_type(dtype)).reshape(shape))


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a file's header, and the place where the values begin.

    Raises:
        ValueError: The file has no header.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MOST_BYTES):
            raise ValueError(
                f"its header has {length:,} bytes in a file of {size:,}: it was cut off, or is another file"
            )
        header: dict[str, Any] = parse(file.read(length), exact=True)
    mapping(header)
    return header, 8 + length


def write_pieces(
    path: Path,
    pieces: Mapping[str, Sequence[Tensor]],
    shapes: Mapping[str, Sequence[int]],
    metadata: Mapping[str, str],
) -> None:
    """Write tensors, each given as consecutive pieces; wide numbers come first, which aligns every tensor to its width."""
    names = sorted(pieces, key=lambda name: -pieces[name][0].element_size())
    head: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name in names:
        end = at + sum(piece.nbytes for piece in pieces[name])
        dtype = _name_of(name, pieces[name][0].dtype)
        head[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [at, end]}
        at = end
    header = json.dumps(head).encode()
    header += b" " * (-len(header) % 8)
    with OwnFile(path, FRESH) as file:
        write_all(file, struct.pack("<Q", len(header)) + header)
        for piece in (piece for name in names for piece in pieces[name] if piece.numel()):
            write_all(file, piece.contiguous().flatten().view(torch.uint8).numpy().data)


def _name_of(site: str, dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise ValueError(
            f"{site} is of {dtype}, which safetensors cannot hold; cast it in the site's transform"
        )
    return _NAMES[dtype]


FORMAT = Safetensors()
