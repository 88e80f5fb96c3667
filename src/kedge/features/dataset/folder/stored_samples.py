"""The samples in a folder of features: their keys, their order, and where their values are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kedge.features.dataset.folder.checksums import VALUES, StoredShard
from kedge.features.dataset.folder.column import RowIndex
from kedge.features.dataset.folder.files import ShardEntry, shard_of
from kedge.stderr import say

_NUMBERED = re.compile(r"(?:(\d+)/)?(?:(\d+):)?(\d+)")


class StoredSamples:
    """The samples of some shards, in the data set's order; read when first needed.

    Args:
        folder: The folder.
        entries: The index entries of the shards.
    """

    def __init__(self, folder: Path, entries: Sequence[ShardEntry]) -> None:
        self._folder, self._entries = folder, entries

    @property
    def keys(self) -> tuple[str, ...]:
        """The samples' keys."""
        return self._found[0]

    @property
    def rows(self) -> RowIndex:
        """The positions of the samples' values."""
        return self._found[1]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each sample, by key."""
        return {key: number for number, key in enumerate(self.keys)}

    @cached_property
    def bad(self) -> dict[str, str]:
        """The reason why each skipped sample has no features, by key."""
        return {key: why for shard in self.shards for _, key, why in shard.about["bad"]}

    @cached_property
    def shards(self) -> list[StoredShard]:
        """The shards with their descriptions, compared with the index."""
        found = [shard_of(self._folder, entry) for entry in self._entries]
        if any(VALUES not in shard.about for shard in found):
            say(
                f"{self._folder} has shards of an earlier version, without checksums: a changed value in them is not noticed"
            )
        return found

    @cached_property
    def _found(self) -> tuple[tuple[str, ...], RowIndex]:
        abouts = [shard.about for shard in self.shards]
        places = [place for about in abouts for place in about.get("places", about["keys"])]
        keys = [key for about in abouts for key in about["keys"]]
        counts = [len(about["keys"]) for about in abouts]
        order = _order(places)
        shard = np.repeat(np.arange(len(counts)), counts)[order]
        row = np.concatenate([np.arange(count) for count in counts] or [np.arange(0)])[order]
        return tuple(keys[number] for number in order), RowIndex(self.shards, shard, row)


def _order(places: list[str]) -> Any:
    """Return the indices that sort places in the data set's order; of equal places the first one counts."""
    numbered = [_NUMBERED.fullmatch(place) for place in places]
    if all(numbered):
        numbers = np.array([[int(part or 0) for part in found.groups()] for found in numbered if found], dtype=np.int64)
        _, first = np.unique(numbers.reshape(-1, 3), axis=0, return_index=True)
        return first
    met: dict[str, int] = {}
    for number, place in enumerate(places):
        met.setdefault(place, number)
    return np.array(sorted(met.values(), key=lambda number: places[number]), dtype=np.int64)
