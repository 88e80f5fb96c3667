"""Where each sample's values are: its shard and its row, in the order of samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.errors import NotFeatures, ReadError
from kedge.features.dataset.folder.checksums import REMEDY
from kedge.features.dataset.folder.formats.format import as_tensor, raw_type
from kedge.features.dataset.folder.stored.shard import Numbers, StoredShard


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
        return self.shards[self.shard.item(sample)].row(site, dtype, self.row.item(sample))

    def several(self, site: str, dtype: torch.dtype, samples: Numbers) -> Tensor:
        """Return the values of some samples as one tensor.

        Raises:
            ReadError: They have different shapes.
        """
        of = self.shard[samples]
        shape = one_shape(site, self.shapes(site, of))
        out = np.empty((len(samples), *shape), raw_type(dtype))
        for shard, which in by_shard(of):
            rows = self.row[samples[which]].astype(np.int64)
            # Samples in order go straight to their place, others need a second copy.
            part = out[which] if isinstance(which, slice) else np.empty((len(rows), *shape), out.dtype)
            self.shards[shard].fill(site, dtype, rows, part)
            if not isinstance(which, slice):
                out[which] = part
        return as_tensor(out, dtype)

    def texts(self, name: str, samples: Numbers) -> list[str]:
        """Return the texts of some samples."""
        found: list[str] = [""] * len(samples)
        for shard, which in by_shard(self.shard[samples]):
            known = self.shards[shard].texts.get(name)
            if known is None or len(known) != len(self.shards[shard].keys):
                raise NotFeatures(f"{self.shards[shard].path} does not have a text {name!r} for each sample; {REMEDY}")
            places = range(len(samples))[which] if isinstance(which, slice) else which.tolist()
            for place, row in zip(places, self.row[samples[which]].tolist(), strict=True):
                found[place] = known[row]
        return found

    def shapes(self, site: str, shards: Any) -> set[tuple[int, ...]]:
        """Return the shapes of a site's values in some shards."""
        used = (self.shards[number] for number in np.unique(shards).tolist())
        return {shard.shapes[site] for shard in used if site in shard.shapes}


def by_shard(shards: NDArray[np.int32]) -> Iterator[tuple[int, slice | Numbers]]:
    """Yield each shard with the places where it stands in an array, as a slice if the array is sorted."""
    if not len(shards):
        return
    steps = np.diff(shards)
    order = None if (steps >= 0).all() else np.argsort(shards, kind="stable")
    arranged = shards if order is None else shards[order]
    cuts = [0, *(np.flatnonzero(steps if order is None else np.diff(arranged)) + 1).tolist(), len(shards)]
    for start, end in pairwise(cuts):
        yield int(arranged[start]), slice(start, end) if order is None else order[start:end]


def one_shape(site: str, shapes: set[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the only shape of samples.

    Raises:
        ReadError: There are several, or none.
    """
    if len(shapes) != 1:
        some = ", ".join(map(str, sorted(shapes)[:4]))
        raise ReadError(
            f"the samples' values of {site!r} have {len(shapes)} shapes and cannot be one tensor ({some}); "
            "read them one by one, or pool them during extraction"
        )
    return next(iter(shapes))
