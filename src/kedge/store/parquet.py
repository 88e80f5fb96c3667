"""The wide table as Arrow batches, and as one Parquet file; only this file and sql.py need more than the store does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kedge.atomic_write import told
from kedge.store.recording import Recording
from kedge.store.wide_table import WIDE, rows_by_site

#: Batches are gathered until a group of rows has as many as this.
GROUP = 1 << 20
#: The key of the metadata under which the file says what run it is from.
ABOUT = b"kedge"

_TYPES = {"text": pa.string(), "float64": pa.float64(), "int8": pa.int8(), "int32": pa.int32(), "int64": pa.int64()}
SCHEMA = pa.schema([pa.field(name, _TYPES[column.type]) for name, column in WIDE.items()])


def batches(recording: Recording, names: Sequence[str] = tuple(WIDE)) -> Iterator[Any]:
    """Give the wide table, one batch for each site.

    Args:
        recording: The recording.
        names: The columns to give; what is not asked for is not computed.
    """
    schema = pa.schema([SCHEMA.field(name) for name in names])
    for site, rows in rows_by_site(recording):
        arrays = [_array(name, *WIDE[name].of(site, rows), len(rows)) for name in names]
        yield pa.record_batch(arrays, schema=schema)


def _array(name: str, values: Any, known: Any, rows: int) -> Any:
    if isinstance(values, str):
        return pa.repeat(pa.scalar(values, pa.string()), rows)
    return pa.array(values, _TYPES[WIDE[name].type], mask=None if known is None or known.all() else ~np.asarray(known))


def write_parquet(recording: Recording, path: Path) -> int:
    """Write the wide table to a file, under another name until it is whole.

    Args:
        recording: The recording.
        path: The file, which is replaced if it is there.
        progress: Is called with the number of rows written so far.

    Returns:
        How many rows there are.

    Raises:
        RecordingError: The file cannot be written.
    """
    text = [name for name, column in WIDE.items() if column.type == "text"]
    floats = [name for name, column in WIDE.items() if column.type == "float64"]
    temporary = path.with_name(f".{path.name}.part")
    schema = SCHEMA.with_metadata({ABOUT: describe(recording)})
    written = 0
    with told(f"write {path}"):
        try:
            with pq.ParquetWriter(
                temporary, schema, compression="zstd", use_dictionary=text, use_byte_stream_split=floats
            ) as writer:
                for table in _groups(recording):
                    writer.write_table(table.cast(schema), row_group_size=len(table))
                    written += len(table)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return written


def _groups(recording: Recording) -> Iterator[Any]:
    held, rows = [], 0
    for batch in batches(recording):
        held.append(batch)
        rows += len(batch)
        if rows >= GROUP:
            yield pa.Table.from_batches(held)
            held, rows = [], 0
    if held:
        yield pa.Table.from_batches(held)


def describe(recording: Recording) -> str:
    """Say in JSON what run this is: its manifest, how it ended, its roots, and what each column means."""
    return json.dumps(
        {
            "manifest": dict(recording.manifest),
            "end": recording.end and dict(recording.end),
            "roots": [{"name": root.name, "prefix": root.prefix} for root in recording.roots],
            "columns": {name: column.meaning for name, column in WIDE.items()},
        }
    )
