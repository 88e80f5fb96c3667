"""Shards as safetensors files, written piece by piece so that no shard is in memory twice."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kedge.features.dataset.folder.formats.format import Shard
from kedge.files.own_file import FRESH, OwnFile, write_all
from kedge.json_input.reading import parse

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


class Safetensors:
    """A file for each shard, with the shard's description in the file's metadata, as JSON under the key kedge."""

    suffix = ".safetensors"
    widens = False

    def write(self, path: Path, shard: Shard) -> None:
        """Write a shard's header and values."""
        shapes = {name: (shard.rows, *pieces[0].shape[1:]) for name, pieces in shard.columns.items()}
        write_pieces(path, shard.columns, shapes, {"kedge": json.dumps(shard.about)})

    def about(self, path: Path) -> dict[str, Any]:
        """Return a shard's description."""
        try:
            with safe_open(path, "pt") as file:
                about: dict[str, Any] = parse(
                    (file.metadata() or {})["kedge"].encode("utf-8", "surrogatepass"), exact=True
                )
        except (SafetensorError, KeyError) as error:
            raise ValueError(str(error)) from error
        return about

    def read(self, path: Path, site: str, rows: slice) -> Tensor:
        """Return consecutive rows of a site; reads only these."""
        try:
            with safe_open(path, "pt") as file:
                found: Tensor = file.get_slice(site)[rows]
        except SafetensorError as error:
            raise ValueError(str(error)) from error
        return found


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
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with OwnFile(path, FRESH) as file:
        write_all(file, struct.pack("<Q", len(text)) + text)
        for piece in (piece for name in names for piece in pieces[name] if piece.numel()):
            write_all(file, piece.contiguous().flatten().view(torch.uint8).numpy().data)


def _name_of(site: str, dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise ValueError(f"{site} is of {dtype}, which safetensors cannot hold; cast it in the site's transform")
    return _NAMES[dtype]


FORMAT = Safetensors()
