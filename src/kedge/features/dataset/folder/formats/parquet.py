"""Shards as Parquet files: a row for each sample, its key and texts, and a column of fixed-size lists for each site."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kedge.features.dataset.folder.formats.format import (
    Shard,
    ValuesInMemory,
    as_raw,
    as_written,
    numpy_pieces,
)
from kedge.json_input.reading import parse

KEY = "key"
#: The key of the shard's description in the file's metadata.
ABOUT = b"kedge"


class Parquet:
    """A file for each shard; a site's values are flat, and their shape is in the file's metadata."""

    suffix = ".parquet"
    widens = True
    most_open = 2  # their columns are in memory

    def write(self, path: Path, shard: Shard) -> None:
        """Write a shard as one table."""
        texts = shard.about.get("texts", {})
        if KEY in {**texts, **shard.columns}:
            raise ValueError(
                f"a site or field cannot be called {KEY!r} in Parquet, as this column holds the samples' keys; rename it"
            )
        arrays = {
            name: pa.array(some, pa.string())
            for name, some in {KEY: shard.about["keys"], **texts}.items()
        }
        sites = {}
        for name, pieces in shard.columns.items():
            if pieces[0].is_complex():
                raise ValueError(
                    f"{name} is of {pieces[0].dtype}, which Parquet cannot hold; cast it in the site's transform"
                )
            values = numpy_pieces(pieces)
            arrays[name] = pa.chunked_array([_flat(value) for value in values])
            sites[name] = [list(pieces[0].shape[1:]), str(pieces[0].dtype).removeprefix("torch.")]
        about = json.dumps({**shard.about, "sites": sites})
        table = pa.table(arrays).replace_schema_metadata({ABOUT: about})
        pq.write_table(table, path, compression="zstd")

    def about(self, path: Path) -> dict[str, Any]:
        """Return a shard's description."""
        about: dict[str, Any] = parse((pq.read_schema(path).metadata or {})[ABOUT], exact=True)
        return about

    def open(self, path: Path, sites: Mapping[str, Any]) -> OpenColumns:
        """Open a shard."""
        return OpenColumns(path, sites)


class OpenColumns:
    """An open file, whose columns are read as a whole and stay in memory.

    Args:
        path: The file.
        sites: For each site the shape of a sample and the dtype.
    """

    def __init__(self, path: Path, sites: Mapping[str, Any]) -> None:
        self._path, self._sites = path, sites

    def values(self, site: str) -> ValuesInMemory:
        """Return the values of a site."""
        shape, dtype = self._sites[site]
        column = pq.read_table(self._path, columns=[site]).column(0).combine_chunks()
        width = int(np.prod(shape))
        values = column.flatten() if shape else column
        array = (
            values.to_numpy(zero_copy_only=False).reshape(len(column), *shape)
            if width
            else np.empty((len(column), *shape))
        )
        written = as_written(np.array(array), dtype)
        return ValuesInMemory(written.dtype, as_raw(written))


def _flat(values: Any) -> Any:
    """Return a column of lists of one length; of plain numbers if a sample is a single number."""
    if values.ndim == 1:
        return pa.array(values)
    width = int(np.prod(values.shape[1:]))
    if not width:  # Parquet's fixed-size lists cannot be empty
        return pa.array([[]] * len(values), pa.list_(pa.from_numpy_dtype(values.dtype)))
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), width)


FORMAT = Parquet()
