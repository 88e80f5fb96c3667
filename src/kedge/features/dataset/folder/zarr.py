"""Shards as zarr groups, with an array for each site."""

from __future__ import annotations

import math
import stat
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray

from kedge.features.dataset.folder.formats import (
    Shard,
    as_raw,
    as_written,
    numpy_pieces,
    type_name,
)

#: The approximate size of a chunk in bytes.
CHUNK = 4 << 20


class Zarr:
    """A folder for each shard, with the shard's description in the group's attribute kedge.

    An array's name must be valid as a folder's, so arrays are numbered and the site is an attribute
    of the array.
    """

    suffix = ".zarr"
    widens = True
    most_open = 64

    def write(self, path: Path, shard: Shard) -> None:
        """Write a shard as a group, piece by piece."""
        group = zarr.open_group(path, mode="w-", zarr_format=3)
        sites = {}
        for number, (name, pieces) in enumerate(shard.columns.items()):
            arrays = numpy_pieces(pieces)
            dtype = arrays[0].dtype
            shape = (shard.rows, *arrays[0].shape[1:])
            chunks = _chunks(shape, dtype)
            made = group.create_array(f"site{number}", shape=shape, dtype=dtype, chunks=chunks)
            made.attrs["site"] = name
            _fill(made, arrays, chunks[0])
            sites[name] = [f"site{number}", type_name(pieces[0].dtype)]
        group.attrs["kedge"] = {**shard.about, "sites": sites}

    def about(self, path: Path) -> dict[str, Any]:
        """Return a shard's description, with the name of the array and the dtype of each site."""
        about: dict[str, Any] = _opened(path).attrs["kedge"]  # type: ignore[assignment]
        return about

    def open(self, path: Path) -> OpenGroup:
        """Open a shard."""
        return OpenGroup(_opened(path))


class OpenGroup:
    """An open shard.

    Args:
        group: The group.
    """

    def __init__(self, group: zarr.Group) -> None:
        about: Any = group.attrs["kedge"]
        self._group = group
        self._sites: dict[str, Any] = about.get("sites", {})

    def values(self, site: str) -> OpenArray:
        """Return the values of a site.

        Raises:
            ValueError: The array's description is not as written. With another one zarr might make
                any number of chunks.
        """
        name, dtype = self._sites[site]
        array: Any = self._group[name]
        if array.chunks != _chunks(array.shape, array.dtype):
            raise ValueError(
                f"{name} has the shape {array.shape} in chunks of {array.chunks}, "
                "which is not as written"
            )
        return OpenArray(array, dtype)


class OpenArray:
    """The values of a site, which are read in chunks.

    Args:
        array: The array.
        dtype: The name of the values' own type.
    """

    memory = None

    def __init__(self, array: Any, dtype: str) -> None:
        self._array, self._written = array, dtype
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.shape: tuple[int, ...] = array.shape

    def rows(self, first: int, last: int) -> NDArray[Any]:
        """Return consecutive rows; reads only the chunks that contain them."""
        return as_raw(as_written(np.asarray(self._array[first:last]), self._written))


def _chunks(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Return the shape of an array's chunks: whole samples, of about `CHUNK` bytes together."""
    row = max(1, math.prod(shape[1:]) * dtype.itemsize)
    return max(1, min(shape[0], CHUNK // row)), *(max(1, width) for width in shape[1:])


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
    """Open a shard for reading, if it has files and folders alone: zarr would wait for a FIFO, or read a device for ever."""
    for entry in path.rglob("*"):
        mode = entry.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ValueError(f"{entry} is not a file")
    return zarr.open_group(path, mode="r", zarr_format=3)


FORMAT = Zarr()
