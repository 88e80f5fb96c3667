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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from kedge.features.dataset.folder.formats import WIDENED, Shard, bytes_in

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
