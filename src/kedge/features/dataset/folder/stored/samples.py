"""The samples in a folder of features: their keys, their order, and where their values are."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kedge.errors import NotFeatures
from kedge.features.dataset.folder.checksums import VALUES
from kedge.features.dataset.folder.files import ShardEntry, description_of
from kedge.features.dataset.folder.manifest import MANIFEST
from kedge.features.dataset.folder.stored.rows import RowIndex
from kedge.features.dataset.folder.stored.shard import Numbers, OpenShards, StoredShard, stamp_of
from kedge.features.dataset.folder.stored.texts import PackedTexts
from kedge.stderr import say

_NUMBERED = re.compile(r"^(?:(\d+)/)?(?:(\d+):)?(\d+)$", re.MULTILINE)
_DIGITS = 18  # a number of so many fits into 64 bits


class _Content(NamedTuple):
    """What the descriptions of a folder's shards say."""

    shards: list[StoredShard]
    rows: RowIndex


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
        self._folder, self._entries, self._fields = folder, entries, frozenset(fields)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shards(self) -> list[StoredShard]:
        """The shards, compared with the index."""
        return self._content.shards

    @property
    def rows(self) -> RowIndex:
        """The positions of the samples' values."""
        return self._content.rows

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The samples' keys."""
        written = list(self._written_keys())
        return tuple(written[place] for place in self._written_places().tolist())

    def number(self, key: str) -> int | None:
        """Return the number of the sample with a key; None if there is none."""
        hashes, numbers = self._by_hash
        wanted = hash(key)
        first, last = (int(np.searchsorted(hashes, wanted, side)) for side in ("left", "right"))
        found = (int(number) for number in numbers[first:last][::-1])
        return next((number for number in found if self._key(number) == key), None)

    @cached_property
    def bad(self) -> dict[str, str]:
        """The reason why each skipped sample has no features, by key."""
        return {key: why for shard in self.shards for _, key, why in shard.bad}

    def close(self) -> None:
        """Close the shards, if they were read."""
        for shard in self.shards if "_content" in vars(self) else ():
            shard.close()

    def __getstate__(self) -> dict[str, Any]:
        # Another process has other hashes, and makes its texts again in less time than it takes to
        # send them.
        return {
            name: value for name, value in vars(self).items() if name not in ("_by_hash", "keys")
        }

    def _key(self, number: int) -> str:
        rows = self.rows
        return rows.shards[rows.shard.item(number)].keys[rows.row.item(number)]

    def _written_keys(self) -> Iterator[str]:
        return chain.from_iterable(shard.keys for shard in self.shards)

    def _written_places(self) -> Numbers:
        """Return for each sample the place of its key among those as they were written."""
        starts = np.cumsum([0, *(len(shard.keys) for shard in self.shards)], dtype=np.int64)
        places: Numbers = starts[self.rows.shard] + self.rows.row
        return places

    @cached_property
    def _by_hash(self) -> tuple[Numbers, Numbers]:
        """The hashes of the keys, sorted, and the number of the sample of each: 16 bytes a sample."""
        hashes = np.fromiter(map(hash, self._written_keys()), np.int64)[self._written_places()]
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order

    @cached_property
    def _content(self) -> _Content:
        others, shards = OpenShards(), list[StoredShard]()
        places, numbers, summed = list[Sequence[str]](), list[NDArray[np.int64] | None](), True
        for entry in self._entries:
            path = self._folder / entry.name
            stamp, about = stamp_of(path), description_of(self._folder, entry)
            unknown = {*about.get("fields", ()), *about.get("texts", ())} - self._fields
            if unknown:
                raise NotFeatures(
                    f"{self._folder / MANIFEST} does not describe {min(unknown)!r}, which {path.name} has: it has changed; "
                    "extract the features again into another folder"
                )
            shards.append(StoredShard(path, about, stamp, others))
            places.append(PackedTexts(about["places"]) if "places" in about else shards[-1].keys)
            numbers.append(numbered(about.get("places", about["keys"])))
            summed = summed and VALUES in about
        if not summed:
            say(
                f"{self._folder} has shards of an earlier version, without checksums: a changed value in them is not noticed"
            )
        order = place_order(places, numbers)
        counts = [len(shard.keys) for shard in shards]
        shard = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[order]
        row = np.concatenate(
            [np.arange(count, dtype=np.int32) for count in counts] or [np.arange(0, dtype=np.int32)]
        )
        return _Content(shards, RowIndex(shards, shard, row[order]))


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
    return np.array(sorted(met.values(), key=lambda number: texts[number]), dtype=np.int64)


def numbered(places: Sequence[str]) -> NDArray[np.int64] | None:
    """Return for each place the numbers of its rank, worker and sample; None if one of them is a name."""
    if max(map(len, places), default=0) > _DIGITS:
        return None
    joined = "".join(places)
    codes = np.zeros((len(places), 3), np.int64)
    if joined.isascii() and joined.isdecimal() and all(places):
        codes[:, 2] = np.fromiter(map(int, places), np.int64, len(places))
        return codes
    found = _NUMBERED.findall("\n".join(places)) if "\n" not in joined else []
    if len(found) != len(places):
        return None
    for column in range(3):
        codes[:, column] = np.fromiter(
            (int(parts[column] or 0) for parts in found), np.int64, len(places)
        )
    return codes
