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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from kedge.errors import KedgeError, NotFeatures
from kedge.features.dataset.folder.files import format_at
from kedge.features.dataset.folder.formats import (
    OWN,
    REMEDY,
    VALUES,
    OpenShard,
    OpenValues,
    as_tensor,
    raw_type,
    sum_of,
)
from kedge.files.atomic_write import told

Array = NDArray[Any]
Numbers = NDArray[np.int64]
#: The seconds for which an open file is taken to be unchanged: to ask takes as long as a row, on a
#: network longer.
TRUSTED = 0.01

_DAMAGE = (SafetensorError, ValueError, KeyError, TypeError, IndexError, RuntimeError)

Stamp = tuple[int, int, int] | None
"""The state of a file, which changes if it is written or replaced; None if there is no file."""


class _Site(NamedTuple):
    """The values of a site in an open shard, with their checksums.

    Attributes:
        values: The values.
        size: The number of rows in a block.
        sums: The checksum of each block.
        sound: Whether each block was compared with its checksum.
    """

    values: OpenValues
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
        described: The state of the file before its description was read.
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
        self, path: Path, about: Mapping[str, Any], described: Stamp, others: OpenShards
    ) -> None:
        self.path = path
        self.keys = PackedTexts(about["keys"])
        self.sites = list(about["shapes"])
        shapes = {**about["shapes"], **about.get("fields", {})}
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        texts = about.get("texts", {})
        self.texts = {name: PackedTexts(some) for name, some in texts.items()}
        self.bad = [tuple(each) for each in about["bad"]]
        self._sums = {
            name: (known["rows"], np.array(known["sums"], np.int64))
            for name, known in about.get(VALUES, {}).items()
        }
        self._own = about.get(OWN)
        self._described = described
        self._others = others
        self._opened: _Opened | None = None

    def row(self, site: str, dtype: torch.dtype, number: int) -> Tensor:
        """Return a site's values of one sample.

        Raises:
            NotFeatures: The shard is damaged or gone, or its values have another type.
        """
        found = self._site(site, dtype)
        memory = found.values.memory
        if memory is None:
            rows = self._covering(site, found, number, number + 1)
            return as_tensor(rows.copy(), dtype)[0]
        block = number // found.size
        if not found.sound[block]:
            start = block * found.size
            self._compare(site, found, block, memory[start : start + found.size])
        return as_tensor(memory[number, ...].copy(), dtype)

    def fill(self, site: str, dtype: torch.dtype, rows: Numbers, out: Array) -> None:
        """Write a site's values in some rows, one or more, into an array of their `raw_type`.

        Raises:
            NotFeatures: As for `row`.
        """
        found = self._site(site, dtype)
        values = found.values.memory
        if values is None:
            first = int(rows.min())
            values = self._covering(site, found, first, int(rows.max()) + 1)
            rows = rows - first
        else:
            blocks = rows // found.size
            sound = found.sound[blocks]
            if not sound.all():
                for block in np.unique(blocks[~sound]).tolist():
                    start = block * found.size
                    self._compare(site, found, block, values[start : start + found.size])
        begin, end = rows.item(0), rows.item(-1) + 1
        if end - begin == len(rows) and (np.diff(rows) == 1).all():
            out[...] = values[begin:end]
        else:
            # In another mode NumPy fills another array first.
            np.take(values, rows, axis=0, out=out, mode="clip")

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
                f"the values of {site!r} are of {found.values.dtype} in "
                f"{self.path.name} and of {dtype} in the manifest: one of the two has "
                "changed; extract the features again into another folder"
            )
        return found

    def _current(self, opened: _Opened | None) -> _Opened:
        """Return the open shard if its file is still the same, else the file as it is now."""
        try:
            stamp = _stamp(self.path.stat())
        except OSError as error:
            raise NotFeatures(
                f"{self.path} cannot be read any more ({error.strerror}): it was there "
                "when the folder was opened; restore it, or open the folder where it "
                "is now"
            ) from error
        if opened is not None and opened.stamp == stamp:
            return opened

        made = format_at(self.path)
        if self._described != stamp:
            with self._reading():
                about = made.about(self.path)
            own = sum_of(about)
            if about.get(OWN) != self._own or own != about.get(OWN, own):
                raise NotFeatures(
                    f"{self.path} was changed or replaced since the folder was opened: "
                    "open the folder again"
                )
            self._described = stamp
        with self._reading():
            shard = made.open(self.path)
        self._opened = current = _Opened(stamp, shard)
        if opened is None:
            self._others.add(self, made.most_open)
        return current

    def _begin(self, shard: OpenShard, site: str) -> _Site:
        if site not in self.shapes:
            raise NotFeatures(
                f"{self.path} has no values of {site!r}, which other shards have; {REMEDY}"
            )
        with self._reading():
            values = shard.values(site)
        count = len(self.keys)
        shape = [count, *self.shapes[site]]
        if list(values.shape) != shape:
            raise NotFeatures(
                f"{self.path} is damaged: the values of {site!r} in {count:,} rows "
                f"have the shape {list(values.shape)}, not {shape}; {REMEDY}"
            )
        if site not in self._sums:
            nothing = np.zeros(1, np.int64)
            return _Site(values, max(count, 1), nothing, np.ones(1, np.bool_))
        size, sums = self._sums[site]
        blocks = -(-count // size)
        if len(sums) != blocks:
            raise NotFeatures(
                f"{self.path} is damaged: {site!r} has {len(sums)} checksums, not "
                f"{blocks}; {REMEDY}"
            )
        return _Site(values, size, sums, np.zeros(blocks, np.bool_))

    def _covering(self, site: str, found: _Site, first: int, last: int) -> Array:
        """Return rows that are not in memory; whole blocks are read and compared."""
        size = found.size
        start, end = first // size, -(-last // size)
        begin = start * size
        with self._reading():
            rows = found.values.rows(begin, min(end * size, len(self.keys)))
        if site in self._sums:
            for block in range(start, end):
                of_block = rows[(block - start) * size : (block + 1 - start) * size]
                self._compare(site, found, block, np.ascontiguousarray(of_block))
        return rows[first - begin : last - begin]

    def _compare(self, site: str, found: _Site, block: int, rows: Array) -> None:
        if zlib.crc32(rows.data) == found.sums[block]:
            found.sound[block] = True
            return
        keys = self.keys[block * found.size : (block + 1) * found.size]
        whose = f"samples {keys[0]!r} to {keys[-1]!r}"
        if len(keys) == 1:
            whose = f"sample {keys[0]!r}"
        raise NotFeatures(
            f"{self.path} is damaged: the values of {site!r} of the {whose} have changed; {REMEDY}"
        )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Context in which errors about what the file holds name it."""
        try:
            with told(f"read {self.path}"):
                yield
        except KedgeError:
            raise
        except _DAMAGE as error:
            raise NotFeatures(f"{self.path} is damaged ({error}); {REMEDY}") from error


class PackedTexts(Sequence[str]):
    """Texts that are joined to one: each takes its characters and eight bytes, not an object.

    Args:
        texts: The texts.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._joined = "".join(texts)
        self._ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, which: int) -> str: ...

    @overload
    def __getitem__(self, which: slice) -> list[str]: ...

    def __getitem__(self, which: int | slice) -> str | list[str]:
        if isinstance(which, slice):
            return [self[number] for number in range(*which.indices(len(self)))]
        end = self._ends[which]
        number = which % len(self)
        return self._joined[self._ends[number - 1] if number else 0 : end]

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self._ends.tolist():
            yield self._joined[start:end]
            start = end


def stamp_of(path: Path) -> Stamp:
    """Return the state of a file."""
    try:
        return _stamp(path.stat())
    except OSError:
        return None


def _stamp(found: os.stat_result) -> Stamp:
    return found.st_ino, found.st_size, found.st_mtime_ns
