"""One shard on the disk, which stays open between reads.

# Note [Open shards]
Opening a shard takes as long as reading thousands of rows. So a shard that was read stays open: its
file is mapped into memory, where a row is one copy, and a block of rows that was compared with its
checksum is not compared again. A read asks the file system whether the file is still the one that
was opened, unless that was asked within the last few milliseconds; one that was changed since is
opened and compared anew, which also keeps a file that was cut off from ending the process. An open
shard needs no file descriptor, belongs to its data set, and is not pickled. After a fork both
processes read from the same memory.
"""

from __future__ import annotations

import os
import time
import weakref
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.errors import KedgeError, NotFeatures
from kedge.features.dataset.folder.checksums import OWN, REMEDY, VALUES, sum_of
from kedge.features.dataset.folder.formats.format import (
    OpenShard,
    OpenValues,
    as_tensor,
    raw_type,
)
from kedge.features.dataset.folder.formats.known import format_name, format_of
from kedge.features.dataset.folder.stored.texts import PackedTexts
from kedge.files.atomic_write import told

Array = NDArray[Any]
Numbers = NDArray[np.int64]
#: The seconds for which an open file is taken to be unchanged: to ask takes as long as a row, on a
#: network longer.
TRUSTED = 0.01

Stamp = tuple[int, int, int] | None
"""The state of a file, which changes if it is written or replaced; None if there is no file."""


class _Site(NamedTuple):
    """The values of a site in an open shard, with their checksums.

    Attributes:
        values: The values.
        memory: The same as an array, if they are in memory.
        size: The number of rows in a block.
        sums: The checksum of each block.
        sound: Whether each block was compared with its checksum.
    """

    values: OpenValues
    memory: Array | None
    size: int
    sums: Numbers
    sound: NDArray[np.bool_]


@dataclass
class _Opened:
    """An open shard.

    Attributes:
        stamp: The state of the file when it was opened.
        shard: The shard.
        sites: The sites whose values were read.
        looked: The time at which the file was still in that state.
    """

    stamp: Stamp
    shard: OpenShard
    sites: dict[str, _Site] = field(default_factory=dict)
    looked: float = 0.0


class _Described(NamedTuple):
    """Where a format has the values, by the description that was read at a state of the file."""

    stamp: Stamp
    sites: Mapping[str, Any]


class OpenShards:
    """The open shards of a data set, of which the oldest are closed if there are too many."""

    def __init__(self) -> None:
        self._shards: deque[weakref.ref[StoredShard]] = deque()

    def add(self, shard: StoredShard, most: int) -> None:
        """Add a shard, and close others until no more than so many are open."""
        self._shards.append(weakref.ref(shard))
        while len(self._shards) > most:
            oldest = self._shards.popleft()()
            if oldest is not None and oldest is not shard:
                oldest.close()

    def __reduce__(self) -> Any:
        return OpenShards, ()


class StoredShard:
    """A shard on the disk, and its description; see Note [Open shards].

    Args:
        path: The file or folder.
        about: The description.
        read_at: The state of the file before its description was read.
        others: The open shards of the data set.

    Attributes:
        path: The file or folder.
        keys: The samples' keys.
        sites: The sites, in the order of the description.
        shapes: For each site and each field of numbers the shape of one sample.
        texts: For each field of texts those of the samples.
        bad: The place, the key and the reason of each sample that was left out.
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any], read_at: Stamp, others: OpenShards
    ) -> None:
        self.path, self._others = path, others
        self._described = _Described(read_at, about.get("sites", {}))
        self.keys = PackedTexts(about["keys"])
        self.sites = list(about["shapes"])
        self.shapes = {
            name: tuple(shape)
            for name, shape in {**about["shapes"], **about.get("fields", {})}.items()
        }
        self.texts = {name: PackedTexts(texts) for name, texts in about.get("texts", {}).items()}
        self.bad = [tuple(each) for each in about["bad"]]
        self._sums = {
            name: (known["rows"], np.array(known["sums"], np.int64))
            for name, known in about.get(VALUES, {}).items()
        }
        self._own = about.get(OWN)
        self._opened: _Opened | None = None

    def row(self, site: str, dtype: torch.dtype, number: int) -> Tensor:
        """Return a site's values of one sample.

        Raises:
            NotFeatures: The shard is damaged or gone, or its values have another type.
        """
        found = self._site(site, dtype)
        if found.memory is None:
            return as_tensor(self._covering(site, found, number, number + 1).copy(), dtype)[0]
        block = number // found.size
        if not found.sound[block]:
            self._compare(
                site, found, block, found.memory[block * found.size : (block + 1) * found.size]
            )
        return as_tensor(found.memory[number, ...].copy(), dtype)

    def fill(self, site: str, dtype: torch.dtype, rows: Numbers, out: Array) -> None:
        """Write a site's values in some rows, one or more, into an array of their `raw_type`.

        Raises:
            NotFeatures: As for `row`.
        """
        found = self._site(site, dtype)
        values = found.memory
        if values is None:
            first = int(rows.min())
            values = self._covering(site, found, first, int(rows.max()) + 1)
            rows = rows - first
        else:
            blocks = rows // found.size
            if not found.sound[blocks].all():
                for block in np.unique(blocks[~found.sound[blocks]]).tolist():
                    self._compare(
                        site, found, block, values[block * found.size : (block + 1) * found.size]
                    )
        begin, end = rows.item(0), rows.item(-1) + 1
        if end - begin == len(rows) and (np.diff(rows) == 1).all():
            out[...] = values[begin:end]
        else:
            np.take(
                values, rows, axis=0, out=out, mode="clip"
            )  # in another mode NumPy fills another array first

    def values(self, site: str, dtype: torch.dtype) -> Tensor:
        """Return all values of a site.

        Raises:
            NotFeatures: As for `row`.
        """
        out = np.empty((len(self.keys), *self.shapes[site]), raw_type(dtype))
        if len(out):
            self.fill(site, dtype, np.arange(len(out)), out)
        return as_tensor(out, dtype)

    def close(self) -> None:
        """Close the shard; the next read opens it again."""
        self._opened = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def _site(self, site: str, dtype: torch.dtype) -> _Site:
        """Return the values of a site, in the file as it is now."""
        opened, now = self._opened, time.monotonic()
        if opened is None or now - opened.looked > TRUSTED:
            opened = self._current(opened)
            opened.looked = now
        found = opened.sites.get(site)
        if found is None:
            found = opened.sites[site] = self._begin(opened.shard, site)
        if found.values.dtype != dtype:
            raise NotFeatures(
                f"the values of {site!r} are of {found.values.dtype} in {self.path.name} and of {dtype} in the manifest: one "
                "of the two has changed; extract the features again into another folder"
            )
        return found

    def _current(self, opened: _Opened | None) -> _Opened:
        """Return the open shard if its file is still the same, else the file as it is now."""
        try:
            found = self.path.stat()
        except OSError as error:
            raise NotFeatures(
                f"{self.path} cannot be read any more ({error.strerror}): it was there when the folder was opened; restore "
                "it, or open the folder where it is now"
            ) from error
        stamp = _stamp(found)
        if opened is not None and opened.stamp == stamp:
            return opened
        made = format_of(format_name(self.path) or "")
        if self._described.stamp != stamp:
            self._described = _Described(stamp, self._description_again().get("sites", {}))
        with told(f"read {self.path}"):
            shard = self._damage_named(lambda: made.open(self.path, self._described.sites))
        self._opened = current = _Opened(stamp, shard)
        if opened is None:
            self._others.add(self, made.most_open)
        return current

    def _description_again(self) -> dict[str, Any]:
        """Return the description in a file that was changed since it was read.

        Raises:
            NotFeatures: It is that of another shard.
        """
        with told(f"read {self.path}"):
            about: dict[str, Any] = self._damage_named(
                lambda: format_of(format_name(self.path) or "").about(self.path)
            )
        if about.get(OWN) != self._own or sum_of(about) != about.get(OWN, sum_of(about)):
            raise NotFeatures(
                f"{self.path} was changed or replaced since the folder was opened: open the folder again"
            )
        return about

    def _begin(self, shard: OpenShard, site: str) -> _Site:
        if site not in self.shapes:
            raise NotFeatures(
                f"{self.path} has no values of {site!r}, which other shards have; {REMEDY}"
            )
        with told(f"read {self.path}"):
            values = self._damage_named(lambda: shard.values(site))
        count, shape = len(self.keys), [len(self.keys), *self.shapes[site]]
        if list(values.shape) != shape:
            raise NotFeatures(
                f"{self.path} is damaged: the values of {site!r} in {shape[0]:,} rows have the shape {list(values.shape)}, not "
                f"{shape}; {REMEDY}"
            )
        size, sums = self._sums.get(site, (max(count, 1), np.zeros(1, np.int64)))
        blocks = -(-count // size)
        if site in self._sums and len(sums) != blocks:
            raise NotFeatures(
                f"{self.path} is damaged: {site!r} has {len(sums)} checksums, not {blocks}; {REMEDY}"
            )
        return _Site(values, values.memory, size, sums, np.full(blocks, site not in self._sums))

    def _covering(self, site: str, found: _Site, first: int, last: int) -> Array:
        """Return rows that are not in memory; whole blocks are read and compared."""
        start, end = first // found.size, -(-last // found.size)
        begin = start * found.size
        with told(f"read {self.path}"):
            rows: Array = self._damage_named(
                lambda: found.values.rows(begin, min(end * found.size, len(self.keys)))
            )
        if site in self._sums:
            for block in range(start, end):
                of_block = rows[(block - start) * found.size : (block + 1 - start) * found.size]
                self._compare(site, found, block, np.ascontiguousarray(of_block))
        return rows[first - begin : last - begin]

    def _compare(self, site: str, found: _Site, block: int, rows: Array) -> None:
        if zlib.crc32(rows.data) == found.sums[block]:
            found.sound[block] = True
            return
        keys = self.keys[block * found.size : (block + 1) * found.size]
        whose = f"sample {keys[0]!r}" if len(keys) == 1 else f"samples {keys[0]!r} to {keys[-1]!r}"
        raise NotFeatures(
            f"{self.path} is damaged: the values of {site!r} of the {whose} have changed; {REMEDY}"
        )

    def _damage_named(self, read: Any) -> Any:
        """Return what a function reads; errors about what a file holds name it."""
        try:
            return read()
        except KedgeError:
            raise
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
            raise NotFeatures(f"{self.path} is damaged ({error}); {REMEDY}") from error


def stamp_of(path: Path) -> Stamp:
    """Return the state of a file."""
    try:
        return _stamp(path.stat())
    except OSError:
        return None


def _stamp(found: os.stat_result) -> Stamp:
    return found.st_ino, found.st_size, found.st_mtime_ns
