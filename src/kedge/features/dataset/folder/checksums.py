"""Checksums of shards: what is read is what was written.

# Note [Checksums]
A shard's description has the CRC-32 of each block of rows of each site, some 64 KiB of values, and one of itself, which
the index repeats. So a changed byte is found when it is read, wherever it is, and a shard in the place of another one too.
The values are summed up as they are read again, in their own type; shape and type are compared, so a changed header is
found as well. Reading a few rows reads their whole blocks. Shards of earlier versions have no checksums.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.errors import NotFeatures
from kedge.features.dataset.folder.formats.format import WIDENED, Shard, format_name, format_of
from kedge.files.atomic_write import told

#: The approximate bytes of a block.
BLOCK = 1 << 16
#: The keys of a shard's description.
OWN, VALUES = "check", "checks"

REMEDY = "remove it and run the extraction again"


def checked(shard: Shard, *, widened: bool) -> Shard:
    """Return a shard with the checksums in its description.

    Args:
        shard: The shard.
        widened: Whether the format stores some types as wider ones, which may change the bits of a NaN.
    """
    sums = {name: _sums_of(pieces, widened=widened) for name, pieces in shard.columns.items()}
    about = {**shard.about, VALUES: sums}
    return Shard({**about, OWN: sum_of(about)}, shard.columns)


def sum_of(about: Mapping[str, Any]) -> int:
    """Return the checksum of a shard's description, without the formats' own keys."""
    own = {key: value for key, value in about.items() if key not in (OWN, "sites")}
    return zlib.crc32(json.dumps(own, sort_keys=True).encode())


def _sums_of(pieces: Sequence[Tensor], *, widened: bool) -> dict[str, Any]:
    """Return the checksums of a site's values, given in consecutive pieces."""
    row = pieces[0][:1].nbytes
    rows = max(1, BLOCK // max(row, 1))
    kept = ((piece.float().to(piece.dtype) if widened and piece.dtype in WIDENED else piece) for piece in pieces)
    return {"rows": rows, "sums": list(_blocks(kept, rows))}


def _blocks(pieces: Iterator[Tensor], rows: int) -> Iterator[int]:
    """Yield the checksum of each block of so many rows; the last one may have fewer."""
    total, left = 0, rows
    for piece in pieces:
        data = piece.contiguous().flatten().view(torch.uint8).numpy().data if piece.numel() else memoryview(b"")
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


@dataclass(frozen=True)
class StoredShard:
    """A shard on the disk, and its description.

    Attributes:
        path: The file or folder.
        about: The description.
    """

    path: Path
    about: Mapping[str, Any]

    def read(self, site: str, rows: slice) -> Tensor:
        """Return a site's values in consecutive rows; see Note [Checksums].

        Raises:
            NotFeatures: The shard is damaged.
        """
        known = self.about.get(VALUES, {}).get(site)
        if known is None:
            return self._values(site, rows)
        size = known["rows"]
        first, last = rows.start // size, -(-rows.stop // size)
        values = self._values(site, slice(first * size, min(last * size, len(self.about["keys"]))))
        found, expected = list(_blocks(iter([values]), size)), known["sums"][first:last]
        if found != expected:
            bad = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), 0)
            keys = self.about["keys"][(first + bad) * size : (first + bad + 1) * size]
            whose = f"sample {keys[0]!r}" if len(keys) == 1 else f"samples {keys[0]!r} to {keys[-1]!r}"
            raise NotFeatures(f"{self.path} is damaged: the values of {site!r} of the {whose} have changed; {REMEDY}")
        return values[rows.start - first * size : rows.stop - first * size]

    def _values(self, site: str, rows: slice) -> Tensor:
        try:
            with told(f"read {self.path}"):
                values = format_of(format_name(self.path) or "").read(self.path, site, rows)
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
            raise NotFeatures(f"{self.path} is damaged ({error}); {REMEDY}") from error
        shape = [rows.stop - rows.start, *self.about["shapes"].get(site, [])]
        if list(values.shape) != shape:
            raise NotFeatures(
                f"{self.path} is damaged: the values of {site!r} in {shape[0]:,} rows have the shape {list(values.shape)}, not "
                f"{shape}; {REMEDY}"
            )
        return values


def state_sum(pieces: Mapping[str, Tensor]) -> str:
    """Return the checksum of named tensors, as a text."""
    named = sorted(pieces.items())
    about = json.dumps([[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in named])
    sums = chain.from_iterable(_blocks(iter([tensor.reshape(1, -1)]), 1) for _, tensor in named)
    return str(zlib.crc32(f"{about} {list(sums)}".encode()))
