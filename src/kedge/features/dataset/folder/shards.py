"""Shard writing: features are collected, passed to reducers, and written once there are enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedge.errors import ExtractionFailed
from kedge.features.dataset.folder.checksums import checked
from kedge.features.dataset.folder.files import (
    INDEX,
    SHARD,
    append,
    entry_of_about,
    remove,
    rename_whole,
    repair,
)
from kedge.features.dataset.folder.formats.format import Shard
from kedge.features.dataset.folder.formats.known import format_of
from kedge.features.dataset.folder.manifest import shown_type, types_of
from kedge.features.dataset.folder.pending_shard import PendingShard
from kedge.features.dataset.folder.stored_reducers import StoredReducers
from kedge.features.dataset.options import Options
from kedge.features.dataset.samples.batch import Columns
from kedge.files.atomic_write import told

_FIRST_BYTES = 4 << 20
"""A shard is no larger than this, or than all earlier shards if that is more: small data sets are thus written while computed."""


class Shards:
    """Writer of one rank's shards; a file that has a shard's name is complete.

    Args:
        folder: The folder, which has its manifest.
        rank: The rank that owns the shards.
        options: The format, the reducers, and when a shard is written.

    Raises:
        NotFeatures: The folder's contents are damaged.
    """

    def __init__(self, folder: Path, rank: int, options: Options) -> None:
        self._folder, self._rank, self._options = folder, rank, options
        self._format = format_of(options.format)
        self._number = repair(folder, rank)
        self._reducers = StoredReducers(folder, rank, options.reducers)
        self._pending = PendingShard()
        self._names: list[str] = []
        self._field_types: dict[str, list[Any]] = {}
        self._written = 0

    def add(self, columns: Columns) -> None:
        """Add the features of a batch, and write a shard if there are enough.

        Raises:
            ExtractionFailed: The values' names differ from those of earlier batches.
            RecordingError: The shard cannot be written; for example, the disk is full.
        """
        columns.wait()
        self._must_be_named_as_before(columns)
        self._must_hold_fields_as_before(columns)
        stored = {name: value for name, value in columns.values.items() if self._is_stored(name)}
        if not self._pending.takes(columns, stored):
            self.write()
        self._reducers.update(columns)
        self._pending.add(columns, stored)
        if self._is_due():
            self.write()

    def _must_be_named_as_before(self, columns: Columns) -> None:
        names = sorted(columns.values)
        if columns.keys and names != (self._names or names):
            self.write()
            raise ExtractionFailed(
                f"the values have the names {', '.join(names)} from sample {columns.keys[0]!r} on, and "
                f"{', '.join(self._names)} before; a site must match as many values in each batch: select one call, "
                'such as "encoder#0"'
            )
        self._names = names if columns.keys else self._names

    def _must_hold_fields_as_before(self, columns: Columns) -> None:
        found = types_of(columns.fields)
        for name, known in self._field_types.items():
            if columns.keys and found.get(name) != known:
                self.write()
                raise ExtractionFailed(
                    f"the field {name!r} holds {shown_type(found[name])} from sample {columns.keys[0]!r} on, and "
                    f"{shown_type(known)} before; return one type from all batches"
                )
        self._field_types = found if columns.keys else self._field_types

    def _is_stored(self, name: str) -> bool:
        return name not in self._reducers or name in self._options.keep

    def _is_due(self) -> bool:
        enough = min(self._options.shard_bytes, max(_FIRST_BYTES, self._written))
        many = self._pending.size >= enough or self._pending.full
        return many or self._pending.age >= self._options.shard_seconds

    def write(self) -> None:
        """Write the collected samples as a shard, then the reducers' state; without samples write nothing."""
        if not self._pending:
            return
        name = SHARD.format(rank=self._rank, number=self._number, suffix=self._format.suffix)
        content = checked(
            self._pending.content(self._rank, self._number), widened=self._format.widens
        )
        entry = entry_of_about(self._folder / name, content.about)
        self._put(name, content)
        self._reducers.write(self._number)
        index = self._folder / INDEX.format(rank=self._rank)
        with told(f"write {index}"):
            append(index, entry.line())
        self._number += 1
        self._written += self._pending.size
        self._pending = PendingShard()

    def _put(self, name: str, shard: Shard) -> None:
        path, temporary = self._folder / name, self._folder / f".{name}.part"
        with told(f"write {path}", then="then run it again, which keeps what is written"):
            try:
                self._format.write(temporary, shard)
                rename_whole(temporary, path)
            except ValueError as error:
                raise ExtractionFailed(f"cannot write {path}: {error}") from error
            finally:
                if temporary.exists():
                    remove(temporary)
