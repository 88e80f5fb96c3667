"""Shards as Parquet files: a row for each sample, its key and texts, and a column of fixed-size lists for each site."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kedge.features.dataset.folder.formats import (
    Shard,
    ValuesInMemory,
    as_raw,
    as_written,
    numpy_pieces,
    type_name,
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
                f"a site or field cannot be called {KEY!r} in Parquet, as this column "
                "holds the samples' keys; rename it"
            )
        arrays = {KEY: pa.array(shard.about["keys"], pa.string())}
        for name, some in texts.items():
            arrays[name] = pa.array(some, pa.string())
        sites = {}
        for name, pieces in shard.columns.items():
            dtype = pieces[0].dtype
            shape = list(pieces[0].shape[1:])
            if dtype.is_complex:
                raise ValueError(
                    f"{name} is of {dtype}, which Parquet cannot hold; cast it in the "
                    "site's transform"
                )
            arrays[name] = pa.chunked_array([_flat(piece) for piece in numpy_pieces(pieces)])
            sites[name] = [shape, type_name(dtype)]
        about = json.dumps({**shard.about, "sites": sites})
        table = pa.table(arrays).replace_schema_metadata({ABOUT: about})
        pq.write_table(table, path, compression="zstd")

    def about(self, path: Path) -> dict[str, Any]:
        """Return a shard's description, with the shape and the dtype of each site."""
        metadata = pq.read_schema(path).metadata or {}
        about: dict[str, Any] = parse(metadata[ABOUT], exact=True)
        return about

    def open(self, path: Path) -> OpenColumns:
        """Open a shard."""
        return OpenColumns(path, self.about(path).get("sites", {}))


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
        count = len(column)
        if not math.prod(shape):
            array = np.empty((count, *shape))
        elif shape:
            elements = column.flatten().to_numpy(zero_copy_only=False)
            array = elements.reshape(count, *shape)
        else:
            array = column.to_numpy(zero_copy_only=False)
        written = as_written(np.array(array), dtype)
        return ValuesInMemory(written.dtype, as_raw(written))


def _flat(values: Any) -> Any:
    """Return a column of lists of one length; of plain numbers if a sample is a single number."""
    if values.ndim == 1:
        return pa.array(values)
    width = math.prod(values.shape[1:])
    if not width:  # Parquet's fixed-size lists cannot be empty
        return pa.array([[]] * len(values), pa.list_(pa.from_numpy_dtype(values.dtype)))
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), width)


FORMAT = Parquet()
