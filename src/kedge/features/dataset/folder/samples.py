"""The samples in a folder of features: their keys, their order, and where their values are."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.errors import NotFeatures, ReadError
from kedge.features.dataset.folder.files import ShardEntry, description_of
from kedge.features.dataset.folder.formats import REMEDY, VALUES, as_tensor, raw_type
from kedge.features.dataset.folder.manifest import MANIFEST
from kedge.features.dataset.folder.stored_shard import (
    Numbers,
    OpenShards,
    PackedTexts,
    StoredShard,
    stamp_of,
)
from kedge.stderr import say

_NUMBERED = re.compile(r"^(?:(\d+)/)?(?:(\d+):)?(\d+)$", re.MULTILINE)
_DIGITS = 18  # a number of so many fits into 64 bits


class StoredSamples:
    """The samples of some shards, in the data set's order; read when first needed.

    Args:
        folder: The folder.
        entries: The index entries of the shards.
        fields: The fields that the manifest describes.
    """

    def __init__(
        self, folder: Path, entries: Sequence[ShardEntry], fields: Collection[str]
    ) -> None:
        self._folder = folder
        self._entries = entries
        self._fields = frozenset(fields)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def rows(self) -> RowIndex:
        """The positions of the samples' values, in shards that were compared with the index."""
        others = OpenShards()
        shards: list[StoredShard] = []
        places: list[Sequence[str]] = []
        numbers: list[NDArray[np.int64] | None] = []
        summed = True
        for entry in self._entries:
            path = self._folder / entry.name
            stamp = stamp_of(path)
            about = description_of(self._folder, entry)
            unknown = {*about.get("fields", ()), *about.get("texts", ())} - self._fields
            if unknown:
                raise NotFeatures(
                    f"{self._folder / MANIFEST} does not describe {min(unknown)!r}, "
                    f"which {path.name} has: it has changed; extract the features "
                    "again into another folder"
                )
            shard = StoredShard(path, about, stamp, others)
            shards.append(shard)
            if "places" in about:
                places.append(PackedTexts(about["places"]))
            else:
                places.append(shard.keys)
            numbers.append(numbered(about.get("places", about["keys"])))
            summed = summed and VALUES in about
        if not summed:
            say(
                f"{self._folder} has shards of an earlier version, without checksums: "
                "a changed value in them is not noticed"
            )

        order = place_order(places, numbers)
        counts = [len(shard.keys) for shard in shards]
        of_shard = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        starts = np.repeat(np.cumsum([0, *counts])[:-1], counts)
        row = (np.arange(len(of_shard)) - starts).astype(np.int32)
        return RowIndex(shards, of_shard[order], row[order])

    @property
    def shards(self) -> Sequence[StoredShard]:
        """The shards, in the order of writing."""
        return self.rows.shards

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The samples' keys."""
        written = list(self._written_keys())
        return tuple(written[place] for place in self._written_places().tolist())

    def number(self, key: str) -> int | None:
        """Return the number of the sample with a key; None if there is none."""
        hashes, numbers = self._by_hash
        wanted = hash(key)
        first = int(np.searchsorted(hashes, wanted, "left"))
        last = int(np.searchsorted(hashes, wanted, "right"))
        rows = self.rows
        for number in numbers[first:last][::-1].tolist():
            shard = rows.shards[rows.shard.item(number)]
            if shard.keys[rows.row.item(number)] == key:
                return int(number)
        return None

    @cached_property
    def bad(self) -> dict[str, str]:
        """The reason why each skipped sample has no features, by key."""
        reasons: dict[str, str] = {}
        for shard in self.shards:
            reasons |= {key: why for _, key, why in shard.bad}
        return reasons

    def close(self) -> None:
        """Close the shards, if they were read."""
        if "rows" in vars(self):
            for shard in self.shards:
                shard.close()

    def __getstate__(self) -> dict[str, Any]:
        # Another process has other hashes, and makes its texts again in less time than it takes to
        # send them.
        aside = ("_by_hash", "keys")
        return {name: value for name, value in vars(self).items() if name not in aside}

    def _written_keys(self) -> Iterator[str]:
        return chain.from_iterable(shard.keys for shard in self.shards)

    def _written_places(self) -> Numbers:
        """Return for each sample the place of its key among those as they were written."""
        counts = [len(shard.keys) for shard in self.shards]
        starts = np.cumsum([0, *counts], dtype=np.int64)
        places: Numbers = starts[self.rows.shard] + self.rows.row
        return places

    @cached_property
    def _by_hash(self) -> tuple[Numbers, Numbers]:
        """The hashes of the keys, sorted, and the number of the sample of each: 16 bytes a sample."""
        written = np.fromiter(map(hash, self._written_keys()), np.int64)
        hashes = written[self._written_places()]
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order


def place_order(
    places: Sequence[Sequence[str]], numbers: Sequence[NDArray[np.int64] | None]
) -> Numbers:
    """Return the indices that sort places in the data set's order; of equal places the first one counts.

    Args:
        places: The places of each shard.
        numbers: The same as `numbered` returns them.
    """
    known = [of_shard for of_shard in numbers if of_shard is not None]
    if len(known) == len(numbers):
        together = np.concatenate([np.empty((0, 3), np.int64), *known])
        order = np.lexsort(together.T[::-1])
        new = np.ones(len(order), bool)
        new[1:] = (np.diff(together[order], axis=0) != 0).any(1)
        return order[new]
    texts = list(chain.from_iterable(places))
    met: dict[str, int] = {}
    for number, place in enumerate(texts):
        met.setdefault(place, number)
    return np.array(sorted(met.values(), key=texts.__getitem__), dtype=np.int64)


def numbered(places: Sequence[str]) -> NDArray[np.int64] | None:
    """Return for each place the numbers of its rank, worker and sample; None if one of them is a name."""
    if max(map(len, places), default=0) > _DIGITS:
        return None
    joined = "".join(places)
    codes = np.zeros((len(places), 3), np.int64)
    if joined.isascii() and joined.isdecimal() and all(places):
        codes[:, 2] = np.fromiter(map(int, places), np.int64, len(places))
        return codes
    found = []
    if "\n" not in joined:
        found = _NUMBERED.findall("\n".join(places))
    if len(found) != len(places):
        return None
    for column in range(3):
        parts = [int(numbers[column] or 0) for numbers in found]
        codes[:, column] = parts
    return codes


_AT_ONCE = (
    64 << 20
)  # bytes that are arranged together: samples in another order than their shards need a second array


@dataclass(frozen=True)
class RowIndex:
    """The position of each sample's values, in the order of samples.

    Attributes:
        shards: The shards.
        shard: For each sample the index of its shard in `shards`.
        row: For each sample its row in that shard.
    """

    shards: Sequence[StoredShard]
    shard: NDArray[np.int32]
    row: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.shard)

    def one(self, site: str, dtype: torch.dtype, sample: int) -> Tensor:
        """Return the values of one sample."""
        shard = self.shards[self.shard.item(sample)]
        return shard.row(site, dtype, self.row.item(sample))

    def several(self, site: str, dtype: torch.dtype, samples: Numbers) -> Tensor:
        """Return the values of some samples as one tensor.

        Raises:
            ReadError: They have different shapes.
        """
        shape = one_shape(site, self.shapes(site, samples))
        out = np.empty((len(samples), *shape), raw_type(dtype))
        step = max(1, _AT_ONCE // max(1, out[:1].nbytes))
        for start in range(0, len(samples), step):
            part = slice(start, start + step)
            self._gather(site, dtype, samples[part], out[part])
        return as_tensor(out, dtype)

    def _gather(self, site: str, dtype: torch.dtype, samples: Numbers, out: NDArray[Any]) -> None:
        order, groups = by_shard(self.shard[samples])
        if order is None:
            arranged = out
        else:
            samples = samples[order]
            arranged = np.empty_like(out)
        rows = self.row[samples].astype(np.int64)
        for shard, start, end in groups:
            self.shards[shard].fill(site, dtype, rows[start:end], arranged[start:end])
        if order is not None:
            out[order] = arranged

    def texts(self, name: str, samples: Numbers) -> list[str]:
        """Return the texts of some samples."""
        found: list[str] = [""] * len(samples)
        order, groups = by_shard(self.shard[samples])
        places = range(len(samples)) if order is None else order.tolist()
        for number, start, end in groups:
            shard = self.shards[number]
            known = shard.texts.get(name)
            if known is None or len(known) != len(shard.keys):
                raise NotFeatures(
                    f"{shard.path} does not have a text {name!r} for each sample; {REMEDY}"
                )
            for place in places[start:end]:
                found[place] = known[self.row.item(samples[place])]
        return found

    def shapes(self, site: str, samples: Numbers | None = None) -> set[tuple[int, ...]]:
        """Return the shapes of a site's values in the shards of some samples, or of all."""
        used = self._used if samples is None else _different(self.shard[samples])
        shapes = [self.shards[number].shapes.get(site) for number in used]
        return {shape for shape in shapes if shape is not None}

    @cached_property
    def _used(self) -> list[int]:
        # Kept, as a loader asks for the shapes with each batch, and there may be millions of
        # samples.
        return _different(self.shard)


def _different(shards: NDArray[np.int32]) -> list[int]:
    used: list[int] = np.flatnonzero(np.bincount(shards)).tolist()
    return used


def by_shard(shards: NDArray[np.int32]) -> tuple[Numbers | None, list[tuple[int, int, int]]]:
    """Return the order that sorts samples by shard, None if they are sorted, and where each shard begins and ends then."""
    if not len(shards):
        return None, []
    order = None
    steps = np.diff(shards)
    if not (steps >= 0).all():
        order = np.argsort(shards, kind="stable")
        shards = shards[order]
        steps = np.diff(shards)
    cuts = [0, *(np.flatnonzero(steps) + 1).tolist(), len(shards)]
    return order, [(shards.item(start), start, end) for start, end in pairwise(cuts)]


def one_shape(site: str, shapes: set[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the only shape of samples.

    Raises:
        ReadError: There are several, or none.
    """
    if len(shapes) != 1:
        some = ", ".join(map(str, sorted(shapes)[:4]))
        raise ReadError(
            f"the samples' values of {site!r} have {len(shapes)} shapes and cannot be "
            f"one tensor ({some}); read them one by one, or pool them during extraction"
        )
    return next(iter(shapes))
