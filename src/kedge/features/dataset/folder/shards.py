"""Shard writing: features are collected, passed to reducers, and written once there are enough."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kedge.atomic_write import told, write_all
from kedge.errors import ExtractionFailed, KedgeError
from kedge.features.dataset.folder.files import INDEX, SHARD, STATE, ShardEntry, remove, repair
from kedge.features.dataset.folder.formats import safetensors
from kedge.features.dataset.folder.formats.format import Shard, format_of
from kedge.features.dataset.options import Options
from kedge.features.dataset.samples.batch import Columns, FailedSample
from kedge.features.dataset.samples.placed import why
from kedge.features.reduce.reducer import Reducer

#: The largest number of samples in a shard, because readers load all its keys at once.
MOST_ROWS = 1 << 17
_RESERVED = "#"
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
        self.folder, self.rank, self._options = folder, rank, options
        self._format = format_of(options.format)
        self._number = repair(folder, rank)
        self._reducers = {name: [copy.deepcopy(one) for one in some] for name, some in options.reducers.items()}
        self._names: list[str] = []
        self._written = 0
        self._load_state()
        self._begin()

    def _begin(self) -> None:
        self._places: list[str] = []
        self._keys: list[str] = []
        self._bad: list[FailedSample] = []
        self._columns: dict[str, list[Tensor]] = {}
        self._size, self._since = 0, time.monotonic()

    def add(self, columns: Columns) -> None:
        """Add the features of a batch, and write a shard if there are enough.

        Raises:
            ExtractionFailed: The values' names differ from those of earlier batches.
            RecordingError: The shard cannot be written; for example, the disk is full.
        """
        columns.wait()
        self._must_be_named_as_before(columns)
        if not self._keys and not self._bad:
            self._since = time.monotonic()  # the age of a shard is the age of its first sample
        kept = {name: value for name, value in columns.values.items() if self._is_kept(name)}
        if self._columns and kept and _shapes(self._columns) != _shapes({name: [v] for name, v in kept.items()}):
            self.write()
        for name, value in columns.values.items():
            for reducer in self._reducers.get(name, ()):
                _take_in(reducer, name, value, columns.keys)
        for name, value in kept.items():
            self._columns.setdefault(name, []).append(value)
            self._size += value.nbytes
        self._places += columns.places
        self._keys += columns.keys
        self._bad += columns.bad
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

    def _is_kept(self, name: str) -> bool:
        return name not in self._reducers or name in self._options.keep

    def _is_due(self) -> bool:
        age = time.monotonic() - self._since
        enough = min(self._options.shard_bytes, max(_FIRST_BYTES, self._written))
        many = self._size >= enough or len(self._keys) >= MOST_ROWS
        return many or age >= self._options.shard_seconds

    def write(self) -> None:
        """Write the collected samples as a shard, then the reducers' state; without samples write nothing."""
        if not self._keys and not self._bad:
            return
        shapes = {name: list(pieces[0].shape[1:]) for name, pieces in self._columns.items()}
        name = SHARD.format(rank=self.rank, number=self._number, suffix=self._format.suffix)
        entry = ShardEntry(name, self.rank, self._number, len(self._keys), len(self._bad), shapes)
        about: dict[str, Any] = {"keys": self._keys, "bad": [[b.place, b.key, b.why] for b in self._bad]}
        about |= {"rank": self.rank, "number": self._number, "shapes": shapes}
        if self._places != self._keys:
            about["places"] = self._places
        self._put(name, Shard(about, self._columns))
        if self._reducers:
            self._write_state()
        with told(f"write {self.folder / INDEX.format(rank=self.rank)}"):
            _append(self.folder / INDEX.format(rank=self.rank), entry.line())
        self._number += 1
        self._written += self._size
        self._begin()

    def _put(self, name: str, shard: Shard) -> None:
        path, temporary = self.folder / name, self.folder / f".{name}.part"
        with told(f"write {path}"):
            try:
                self._format.write(temporary, shard)
                _settle(temporary, path)
            except ValueError as error:
                raise ExtractionFailed(f"cannot write {path}: {error}") from error
            finally:
                if temporary.exists():
                    remove(temporary)

    def _write_state(self) -> None:
        """Write the reducers' state, and the number of the last shard that it counts."""
        pieces = {
            f"{name}{_RESERVED}{number}{_RESERVED}{part}": tensor
            for name, some in self._reducers.items()
            for number, reducer in enumerate(some)
            for part, tensor in reducer.state().items()
        }
        path = self.folder / STATE.format(rank=self.rank)
        temporary = path.with_name(f".{path.name}.part")
        with told(f"write {path}"):
            try:
                shapes = {name: tensor.shape for name, tensor in pieces.items()}
                through = {"through": str(self._number)}
                safetensors.write_pieces(temporary, {name: [t] for name, t in pieces.items()}, shapes, through)
                _settle(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)

    def _load_state(self) -> None:
        path = self.folder / STATE.format(rank=self.rank)
        if self._reducers and path.exists():
            states = read_state(path)
            for name, some in self._reducers.items():
                for number, reducer in enumerate(some):
                    reducer.load(states[name][number])


def _take_in(reducer: Reducer, name: str, value: Tensor, keys: Sequence[str]) -> None:
    """Update a reducer, which may be the user's own, with the values of a batch."""
    try:
        reducer.update(value, keys)
    except KedgeError:
        raise
    except Exception as error:
        raise ExtractionFailed(
            f"the reducer {type(reducer).__name__} of {name!r} failed at the batch of sample {keys[0]!r}, values of "
            f"shape {tuple(value.shape)}: {why(error)}; fix it, and name another folder, as its present values are "
            "incomplete"
        ) from error


def read_state(path: Path) -> dict[str, list[dict[str, Tensor]]]:
    """Return the states of a rank's reducers: for each site a list."""
    states: dict[str, list[dict[str, Tensor]]] = {}
    with told(f"read {path}"), safe_open(path, "pt") as file:
        for full in sorted(
            file.keys(), key=lambda full: (full.rsplit(_RESERVED, 2)[0], int(full.rsplit(_RESERVED, 2)[1]))
        ):
            name, number, part = full.rsplit(_RESERVED, 2)
            some = states.setdefault(name, [])
            if int(number) == len(some):
                some.append({})
            some[int(number)][part] = file.get_tensor(full)
    return states


def _shapes(columns: Mapping[str, Sequence[Tensor]]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (pieces[0].dtype, pieces[0].shape[1:]) for name, pieces in columns.items()}


def _settle(temporary: Path, path: Path) -> None:
    """Rename a written file or folder once all of it is on the disk."""
    within = [*temporary.rglob("*")] if temporary.is_dir() else []
    for each in (*within, temporary):
        _sync(each)
    temporary.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _append(path: Path, line: str) -> None:
    with FileIO(path, "a") as file:
        write_all(file, line.encode())
