"""Checksums of shards: what is read is what was written.

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
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kedge.features.dataset.folder.formats.format import WIDENED, Shard

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
    sums = {name: _sums_of(pieces, widened=widened) for name, pieces in shard.columns.items()}
    about = {**shard.about, VALUES: sums}
    return Shard({**about, OWN: sum_of(about)}, shard.columns)


def sum_of(about: Mapping[str, Any]) -> int:
    """Return the checksum of a shard's description, without the formats' own keys."""
    own = {key: value for key, value in about.items() if key not in (OWN, "sites")}
    return zlib.crc32(json.dumps(own, sort_keys=True).encode())


def _sums_of(pieces: Sequence[Tensor], *, widened: bool) -> dict[str, Any]:
    row = pieces[0][:1].nbytes
    rows = max(1, BLOCK // max(row, 1))
    kept = (
        (piece.float().to(piece.dtype) if widened and piece.dtype in WIDENED else piece)
        for piece in pieces
    )
    return {"rows": rows, "sums": list(_blocks(kept, rows))}


def _blocks(pieces: Iterator[Tensor], rows: int) -> Iterator[int]:
    """Yield the checksum of each block of so many rows; the last one may have fewer."""
    total, left = 0, rows
    for piece in pieces:
        data = (
            piece.contiguous().flatten().view(torch.uint8).numpy().data
            if piece.numel()
            else memoryview(b"")
        )
        width, at = len(data) // max(len(piece), 1), 0
        while at < len(piece):
            taken = min(left, len(piece) - at)
            total = zlib.crc32(data[at * width : (at + taken) * width], total)
            at, left = at + taken, left - taken
            if not left:
                yield total
                total, left = 0, rows
    if left < rows:
        yield total


def state_sum(pieces: Mapping[str, Tensor]) -> str:
    """Return the checksum of named tensors, as a text."""
    named = sorted(pieces.items())
    about = json.dumps([[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in named])
    sums = chain.from_iterable(_blocks(iter([tensor.reshape(1, -1)]), 1) for _, tensor in named)
    return str(zlib.crc32(f"{about} {list(sums)}".encode()))
