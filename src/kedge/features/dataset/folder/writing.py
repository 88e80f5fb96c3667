"""Features on their way to the disk: from the computing thread to a writer, which makes shards of them.

# Note [Bunches]
Waking the writer thread takes the computing thread longer than a small batch. So batches are handed
over in bunches: of a megabyte, or of a quarter of a second.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from kedge.errors import ExtractionFailed, KedgeError
from kedge.features.dataset.batch import Columns, FailedSample, bytes_of, why
from kedge.features.dataset.folder.files import (
    INDEX,
    RESERVED,
    SHARD,
    STATE,
    append,
    entry_of_about,
    format_of,
    read_state,
    remove,
    rename_whole,
    repair,
)
from kedge.features.dataset.folder.formats import OWN, Shard, checked, state_sum, write_pieces
from kedge.features.dataset.folder.manifest import shown_type, types_of
from kedge.features.dataset.options import Options
from kedge.features.reduce.reducer import Reducer
from kedge.files.atomic_write import told

_BUNCH = 1 << 20
_SECONDS = 0.25
#: A shard is no larger than this, or than all earlier shards if that is more: small data sets are
#: thus written while computed.
_FIRST_BYTES = 4 << 20
#: The largest number of samples in a shard, because readers load all its keys at once.
MOST_ROWS = 1 << 17
#: The largest number of characters in keys and texts: a header of safetensors holds 100 MB, and
#: JSON within JSON takes up to 14 bytes for one.
_MOST_CHARACTERS = 6 << 20


class ShardWriter:
    """Context manager with a thread that adds features to shards, from a queue of limited size in bytes.

    However the block ends, all features handed over are written, unless writing itself fails. An
    error in the thread is raised at the next hand-over of features, or at the end.

    Args:
        shards: The shards.
        limit: The number of bytes that may wait; a single bunch may exceed it.
    """

    def __init__(self, shards: Shards, limit: int) -> None:
        self._shards = shards
        self._limit = limit
        self._bunch = min(_BUNCH, limit // 8)
        self._gathered: list[Columns] = []
        self._size = 0
        self._since = 0.0
        self._waiting: deque[list[Columns] | None] = deque()
        self._held = 0
        self._changed = threading.Condition()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(
            target=self._work, name="kedge-writes-features", daemon=True
        )

    def put(self, columns: Columns) -> None:
        """Add features to the next bunch, and hand it over if it is due; wait while too many bytes are in the queue.

        Raises:
            KedgeError: Writing failed, or a reducer raised an error.
        """
        now = time.monotonic()
        if not self._gathered:
            self._since = now
        self._gathered.append(columns)
        self._size += columns.size
        is_due = self._size >= self._bunch or now - self._since >= _SECONDS
        if not is_due and self._failed is None:
            return

        bunch, size = self._gathered, self._size
        self._gathered, self._size = [], 0
        with self._changed:
            self._changed.wait_for(
                lambda: self._failed or not self._waiting or self._held + size <= self._limit
            )
            self._raise()
            self._waiting.append(bunch)
            self._held += size
            self._changed.notify_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._waiting += [self._gathered, None]
            self._changed.notify_all()
        self._thread.join()
        if error is None:
            self._raise()
        elif self._failed is not None and self._failed is not error:
            error.add_note(f"and the features computed before could not be written: {self._failed}")

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    @torch.no_grad()
    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting)
                    bunch = self._waiting.popleft()
                if bunch is None:
                    break
                size = sum(columns.size for columns in bunch)
                while bunch:  # pop, so that no reference remains here while a shard is written
                    self._shards.add(bunch.pop(0))
                with self._changed:
                    self._held -= size
                    self._changed.notify_all()
            self._shards.write()
        except BaseException as error:  # noqa: BLE001 - raised again in the computing thread
            with self._changed:
                self._failed = error
                self._waiting.clear()
                self._changed.notify_all()


class Shards:
    """Writer of one rank's shards: features are collected, passed to reducers, and written once there are enough.

    Args:
        folder: The folder, which has its manifest.
        rank: The rank that owns the shards.
        options: The format, the reducers, and when a shard is written.

    Raises:
        NotFeatures: The folder's contents are damaged.
    """

    def __init__(self, folder: Path, rank: int, options: Options) -> None:
        self._folder = folder
        self._rank = rank
        self._options = options
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
            ExtractionFailed: The values' names, or the types of fields, differ from those of
                earlier batches.
            RecordingError: The shard cannot be written; for example, the disk is full.
        """
        columns.wait()
        if columns.keys:
            self._must_be_as_before(columns)

        stored = dict(columns.values)
        for name in self._reducers.by_site:
            if name not in self._options.keep:
                stored.pop(name, None)
        if not self._pending.takes(columns, stored):
            self.write()
        self._reducers.update(columns)
        self._pending.add(columns, stored)

        pending = self._pending
        enough = min(self._options.shard_bytes, max(_FIRST_BYTES, self._written))
        is_full = pending.size >= enough or len(pending.keys) >= MOST_ROWS
        is_full = is_full or pending.characters >= _MOST_CHARACTERS
        if is_full or time.monotonic() - pending.since >= self._options.shard_seconds:
            self.write()

    def _must_be_as_before(self, columns: Columns) -> None:
        first = columns.keys[0]
        names = sorted(columns.values)
        if self._names and names != self._names:
            self.write()
            raise ExtractionFailed(
                f"the values have the names {', '.join(names)} from sample {first!r} "
                f"on, and {', '.join(self._names)} before; a site must match as many "
                "values in each "
                'batch: select one call, such as "encoder#0"'
            )
        types = types_of(columns.fields)
        for name, known in self._field_types.items():
            if types.get(name) != known:
                self.write()
                raise ExtractionFailed(
                    f"the field {name!r} holds {shown_type(types[name])} from sample "
                    f"{first!r} on, and {shown_type(known)} before; return one type "
                    "from all batches"
                )
        self._names = names
        self._field_types = types

    def write(self) -> None:
        """Write the collected samples as a shard, then the reducers' state; without samples write nothing."""
        if not self._pending:
            return
        content = self._pending.content(self._rank, self._number)
        content = checked(content, widened=self._format.widens)
        suffix = self._format.suffix
        name = SHARD.format(rank=self._rank, number=self._number, suffix=suffix)
        path = self._folder / name
        temporary = self._folder / f".{name}.part"
        with told(f"write {path}", then="then run it again, which keeps what is written"):
            try:
                self._format.write(temporary, content)
                rename_whole(temporary, path)
            except ValueError as error:
                raise ExtractionFailed(f"cannot write {path}: {error}") from error
            finally:
                if temporary.exists():
                    remove(temporary)

        self._reducers.write(self._number)
        index = self._folder / INDEX.format(rank=self._rank)
        with told(f"write {index}"):
            append(index, entry_of_about(path, content.about).line())
        self._number += 1
        self._written += self._pending.size
        self._pending = PendingShard()


class PendingShard:
    """The samples that wait to be written as one shard.

    Attributes:
        keys: Their keys.
        size: The bytes of their values.
        characters: The characters of their keys and texts.
        since: When the first one was added.
    """

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.size = 0
        self.characters = 0
        self.since = time.monotonic()
        self._places: list[str] = []
        self._bad: list[FailedSample] = []
        self._columns: dict[str, list[Tensor]] = {}
        self._fields: dict[str, list[Tensor]] = {}
        self._texts: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        """Return whether there are samples."""
        return bool(self.keys or self._bad)

    def takes(self, columns: Columns, values: Mapping[str, Tensor]) -> bool:
        """Return whether a batch has the dtypes and shapes of those before it."""
        known = _types_and_shapes({**self._columns, **self._fields})
        new = {name: [value] for name, value in values.items()}
        for name, field in columns.fields.items():
            if isinstance(field, Tensor):
                new[name] = [field]
        return not known or not new or known == _types_and_shapes(new)

    def add(self, columns: Columns, values: Mapping[str, Tensor]) -> None:
        """Add the samples of a batch.

        Args:
            columns: The batch.
            values: Those of its values that are stored.
        """
        if not self:
            self.since = time.monotonic()
        for name, value in values.items():
            self._columns.setdefault(name, []).append(value)
            self.size += value.nbytes
        for name, field in columns.fields.items():
            if isinstance(field, Tensor):
                self._fields.setdefault(name, []).append(field)
            else:
                self._texts.setdefault(name, []).extend(field)
                self.characters += bytes_of(field)
            self.size += bytes_of(field)
        self._places += columns.places
        self.keys += columns.keys
        self.characters += bytes_of(columns.keys)
        self._bad += columns.bad

    def content(self, rank: int, number: int) -> Shard:
        """Return the content of the file."""
        about: dict[str, Any] = {
            "keys": self.keys,
            "bad": [[one.place, one.key, one.why] for one in self._bad],
            "rank": rank,
            "number": number,
            "shapes": _sample_shapes(self._columns),
        }
        if self._fields:
            about["fields"] = _sample_shapes(self._fields)
        if self._texts:
            about["texts"] = self._texts
        if self._places != self.keys:
            about["places"] = self._places
        return Shard(about, {**self._columns, **self._fields})


def _sample_shapes(columns: Mapping[str, Sequence[Tensor]]) -> dict[str, list[int]]:
    return {name: list(pieces[0].shape[1:]) for name, pieces in columns.items()}


def _types_and_shapes(columns: Mapping[str, Sequence[Tensor]]) -> dict[str, Any]:
    first = {name: pieces[0] for name, pieces in columns.items()}
    return {name: (piece.dtype, piece.shape[1:]) for name, piece in first.items()}


class StoredReducers:
    """The reducers of one rank; they continue from the state in the folder.

    Args:
        folder: The folder.
        rank: The rank.
        reducers: For each site its reducers, which are copied.

    Attributes:
        by_site: The copies.
    """

    def __init__(self, folder: Path, rank: int, reducers: Mapping[str, Sequence[Reducer]]) -> None:
        self._path = folder / STATE.format(rank=rank)
        self.by_site: dict[str, list[Reducer]] = {}
        for name, some in reducers.items():
            self.by_site[name] = list(map(copy.deepcopy, some))
        if not self.by_site or not self._path.exists():
            return
        states = read_state(self._path)
        for name, some in self.by_site.items():
            for number, reducer in enumerate(some):
                reducer.load(states[name][number])

    def update(self, columns: Columns) -> None:
        """Update the reducers, which may be the user's own, with the values of a batch.

        Raises:
            ExtractionFailed: A reducer failed.
        """
        for name, value in columns.values.items():
            for reducer in self.by_site.get(name, ()):
                try:
                    reducer.update(value, columns.keys)
                except KedgeError:
                    raise
                except Exception as error:
                    raise ExtractionFailed(
                        f"the reducer {type(reducer).__name__} of {name!r} failed at "
                        f"the batch of sample {columns.keys[0]!r}, values of shape "
                        f"{tuple(value.shape)}: {why(error)}; fix it, and name another "
                        "folder, as its present values are incomplete"
                    ) from error

    def write(self, through: int) -> None:
        """Write the state, if there are reducers.

        Args:
            through: The number of the last shard that it counts.
        """
        if not self.by_site:
            return
        pieces: dict[str, Tensor] = {}
        for name, some in self.by_site.items():
            for number, reducer in enumerate(some):
                for part, tensor in reducer.state().items():
                    pieces[f"{name}{RESERVED}{number}{RESERVED}{part}"] = tensor

        temporary = self._path.with_name(f".{self._path.name}.part")
        with told(f"write {self._path}"):
            try:
                write_pieces(
                    temporary,
                    {name: [tensor] for name, tensor in pieces.items()},
                    {name: tensor.shape for name, tensor in pieces.items()},
                    {"through": str(through), OWN: state_sum(pieces)},
                )
                rename_whole(temporary, self._path)
            finally:
                temporary.unlink(missing_ok=True)
