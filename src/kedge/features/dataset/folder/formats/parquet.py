"""Shards as Parquet files: a row for each sample, its key, and a column of fixed-size lists for each site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from kedge.features.dataset.folder.formats.format import Shard, as_written, numpy_pieces
from kedge.json_input.reading import parse

KEY = "key"
#: The key of the shard's description in the file's metadata.
ABOUT = b"kedge"


class Parquet:
    """A file for each shard; a site's values are flat, and their shape is in the file's metadata."""

    suffix = ".parquet"
    widens = True

    def write(self, path: Path, shard: Shard) -> None:
        """Write a shard as one table."""
        arrays, sites = {KEY: pa.array(shard.about["keys"], pa.string())}, {}
        for name, pieces in shard.columns.items():
            if name == KEY:
                raise ValueError(
                    f"a site cannot be called {KEY!r} in Parquet, as this column holds the samples' keys; rename it"
                )
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

    def read(self, path: Path, site: str, rows: slice) -> Tensor:
        """Return consecutive rows of a site; reads its whole column."""
        shape, dtype = self.about(path)["sites"][site]
        column = pq.read_table(path, columns=[site]).column(0).combine_chunks()[rows]
        width = int(np.prod(shape))
        values = column.flatten() if shape else column
        array = (
            values.to_numpy(zero_copy_only=False).reshape(len(column), *shape)
            if width
            else np.empty((len(column), *shape))
        )
        return as_written(np.array(array), dtype)


def _flat(values: Any) -> Any:
    """Return a column of lists of one length; of plain numbers if a sample is a single number."""
    if values.ndim == 1:
        return pa.array(values)
    width = int(np.prod(values.shape[1:]))
    if not width:  # Parquet's fixed-size lists cannot be empty
        return pa.array([[]] * len(values), pa.list_(pa.from_numpy_dtype(values.dtype)))
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), width)


FORMAT = Parquet()
