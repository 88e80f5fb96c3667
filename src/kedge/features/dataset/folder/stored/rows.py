"""Where each sample's values are: its shard and its row, in the order of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
        return self.shards[self.shard.item(sample)].row(site, dtype, self.row.item(sample))

    def several(self, site: str, dtype: torch.dtype, samples: Numbers) -> Tensor:
        """Return the values of some samples as one tensor.

        Raises:
            ReadError: They have different shapes.
        """
        shape = one_shape(site, self.shapes(site, samples))
        out = np.empty((len(samples), *shape), raw_type(dtype))
        step = max(1, _AT_ONCE // max(1, out[:1].nbytes))
        for start in range(0, len(samples), step):
            self._gather(site, dtype, samples[start : start + step], out[start : start + step])
        return as_tensor(out, dtype)

    def _gather(self, site: str, dtype: torch.dtype, samples: Numbers, out: NDArray[Any]) -> None:
        order, groups = by_shard(self.shard[samples])
        rows = self.row[samples if order is None else samples[order]].astype(np.int64)
        arranged = out if order is None else np.empty_like(out)
        for shard, start, end in groups:
            self.shards[shard].fill(site, dtype, rows[start:end], arranged[start:end])
        if order is not None:
            out[order] = arranged

    def texts(self, name: str, samples: Numbers) -> list[str]:
        """Return the texts of some samples."""
        found: list[str] = [""] * len(samples)
        order, groups = by_shard(self.shard[samples])
        places = range(len(samples)) if order is None else order.tolist()
        for shard, start, end in groups:
            known = self.shards[shard].texts.get(name)
            if known is None or len(known) != len(self.shards[shard].keys):
                raise NotFeatures(
                    f"{self.shards[shard].path} does not have a text {name!r} for each sample; {REMEDY}"
                )
            for place in places[start:end]:
                found[place] = known[self.row.item(samples[place])]
        return found

    def shapes(self, site: str, samples: Numbers | None = None) -> set[tuple[int, ...]]:
        """Return the shapes of a site's values in the shards of some samples, or of all."""
        used = self._used if samples is None else _different(self.shard[samples])
        return {
            self.shards[number].shapes[site]
            for number in used
            if site in self.shards[number].shapes
        }

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
    steps = np.diff(shards)
    order = None if (steps >= 0).all() else np.argsort(shards, kind="stable")
    if order is not None:
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
            f"the samples' values of {site!r} have {len(shapes)} shapes and cannot be one tensor ({some}); "
            "read them one by one, or pool them during extraction"
        )
    return next(iter(shapes))
