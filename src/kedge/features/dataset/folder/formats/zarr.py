"""Shards as zarr groups, with an array for each site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import zarr
from torch import Tensor

from kedge.features.dataset.folder.formats.format import Shard, as_written, numpy_pieces

#: The approximate size of a chunk in bytes.
CHUNK = 4 << 20


class Zarr:
    """A folder for each shard, with the shard's description in the group's attribute kedge.

    An array's name must be valid as a folder's, so arrays are numbered and the site is an attribute of the array.
    """

    suffix = ".zarr"
    widens = True

    def write(self, path: Path, shard: Shard) -> None:
        """Write a shard as a group, piece by piece."""
        group = zarr.open_group(path, mode="w-", zarr_format=3)
        sites = {}
        for number, (name, pieces) in enumerate(shard.columns.items()):
            arrays = numpy_pieces(pieces)
            shape, row = (shard.rows, *arrays[0].shape[1:]), max(1, arrays[0][:1].nbytes)
            chunks = (max(1, min(shard.rows, CHUNK // row)), *(max(1, width) for width in shape[1:]))
            made = group.create_array(f"site{number}", shape=shape, dtype=arrays[0].dtype, chunks=chunks)
            made.attrs["site"] = name
            _fill(made, arrays, chunks[0])
            sites[name] = [f"site{number}", str(pieces[0].dtype).removeprefix("torch.")]
        group.attrs["kedge"] = {**shard.about, "sites": sites}

    def about(self, path: Path) -> dict[str, Any]:
        """Return a shard's description."""
        about: dict[str, Any] = _opened(path).attrs["kedge"]  # type: ignore[assignment]
        return about

    def read(self, path: Path, site: str, rows: slice) -> Tensor:
        """Return consecutive rows of a site; reads only the chunks that contain them."""
        name, dtype = self.about(path)["sites"][site]
        return as_written(np.asarray(_opened(path)[name][rows]), dtype)  # type: ignore[index]


def _fill(array: Any, pieces: list[Any], rows: int) -> None:
    """Write whole chunks; otherwise each piece would read and rewrite a partial chunk."""
    start, held = 0, []
    for piece in pieces:
        held.append(piece)
        while sum(map(len, held)) >= rows:
            together = np.concatenate(held)
            array[start : start + rows] = together[:rows]
            start, held = start + rows, [together[rows:]]
    if sum(map(len, held)):
        array[start:] = np.concatenate(held)


def _opened(path: Path) -> zarr.Group:
    return zarr.open_group(path, mode="r", zarr_format=3)


FORMAT = Zarr()
