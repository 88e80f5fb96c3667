"""The wide table as Arrow batches and as one Parquet file; only this file and sql.py need pyarrow."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kedge.files.atomic_write import told
from kedge.store.export.wide_table import WIDE, rows_by_site
from kedge.store.recording import Recording

#: The rows gathered for one row group.
GROUP = 1 << 20
#: The key of the metadata that describes the run.
ABOUT = b"kedge"

_TYPES = {
    "text": pa.string(),
    "float64": pa.float64(),
    "int8": pa.int8(),
    "int32": pa.int32(),
    "int64": pa.int64(),
}
SCHEMA = pa.schema([pa.field(name, _TYPES[column.type]) for name, column in WIDE.items()])


def batches(recording: Recording, names: Sequence[str] = tuple(WIDE)) -> Iterator[Any]:
    """Yield the wide table, one batch for each site.

    Args:
        recording: The recording.
        names: The columns; others are not computed.
    """
    schema = pa.schema([SCHEMA.field(name) for name in names])
    for site, rows in rows_by_site(recording):
        arrays = [_array(name, *WIDE[name].of(site, rows), len(rows)) for name in names]
        yield pa.record_batch(arrays, schema=schema)


def _array(name: str, values: Any, known: Any, rows: int) -> Any:
    if isinstance(values, str):
        return pa.repeat(pa.scalar(values, pa.string()), rows)
    mask = None
    if known is not None and not known.all():
        mask = ~np.asarray(known)
    return pa.array(values, _TYPES[WIDE[name].type], mask=mask)


def write_parquet(recording: Recording, path: Path) -> int:
    """Write the wide table to a file, under another name until it is complete.

    Args:
        recording: The recording.
        path: The file; an existing one is replaced if it is a regular file, and nothing else ever
            is.

    Returns:
        The number of rows.

    Raises:
        RecordingError: The file cannot be written.
    """
    text = [name for name, column in WIDE.items() if column.type == "text"]
    floats = [name for name, column in WIDE.items() if column.type == "float64"]
    temporary = path.with_name(f".kedge-{token_hex(8)}.part")
    schema = SCHEMA.with_metadata({ABOUT: describe(recording)})
    written = 0
    with told(f"write {path}"):
        # Made anew, so that nobody who guesses the name can have put a link there.
        file = FileIO(temporary, "x")
        try:
            with (
                file,
                pq.ParquetWriter(
                    file,
                    schema,
                    compression="zstd",
                    use_dictionary=text,
                    use_byte_stream_split=floats,
                ) as writer,
            ):
                for table in _groups(recording):
                    writer.write_table(table.cast(schema), row_group_size=len(table))
                    written += len(table)
            if is_other(path):
                raise FileExistsError(errno.EEXIST, "something else than a file is there")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return written


def is_other(path: Path) -> bool:
    """Whether a path is taken by a folder, a link, a device or a pipe: anything but a regular file."""
    return os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode)


def _groups(recording: Recording) -> Iterator[Any]:
    held = []
    rows = 0
    for batch in batches(recording):
        held.append(batch)
        rows += len(batch)
        if rows >= GROUP:
            yield pa.Table.from_batches(held)
            held = []
            rows = 0
    if held:
        yield pa.Table.from_batches(held)


def describe(recording: Recording) -> str:
    """Return a description of the run as JSON, with the meaning of each column."""
    return json.dumps(
        {
            "manifest": dict(recording.manifest),
            "end": recording.end and recording.end.entry(),
            "roots": [{"name": root.name, "prefix": root.prefix} for root in recording.roots],
            "columns": {name: column.meaning for name, column in WIDE.items()},
        }
    )
