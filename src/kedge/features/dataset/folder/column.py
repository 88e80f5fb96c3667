"""The values of one site over all samples, read from shards on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.errors import NotFeatures, ReadError
from kedge.features.dataset.folder.checksums import StoredShard

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class RowIndex:
    """The position of each sample's values, in the order of samples.

    Attributes:
        shards: The shards.
        shard: For each sample the index of its shard in `shards`.
        row: For each sample its row in that shard.
    """

    shards: Sequence[StoredShard]
    shard: Numbers
    row: Numbers

    def read(self, site: str, samples: Numbers) -> Iterator[tuple[Numbers, Tensor]]:
        """Yield a site's values for some samples, shard by shard.

        Yields:
            The indices into `samples`, and the values of those samples.
        """
        order = np.argsort(self.shard[samples], kind="stable")
        shards, starts = np.unique(self.shard[samples][order], return_index=True)
        for shard, which in zip(shards, np.split(order, starts[1:]), strict=True):
            rows = self.row[samples[which]]
            first = int(rows.min())
            values = self.shards[shard].read(site, slice(first, int(rows.max()) + 1))
            # Consecutive rows, the usual case, need no selection.
            follow = len(rows) == len(values) and bool((np.diff(rows) == 1).all())
            yield which, values if follow else values[torch.from_numpy(rows - first)]


class FeatureColumn:
    """The values of one site: a sequence of tensors on the disk, one for each sample.

    `column[3]` reads one sample, `column[10:20]` and `column[[1, 5]]` read several, `column.tensor()` reads all.

    Attributes:
        name: The site.
        dtype: The type of the numbers.
    """

    def __init__(self, name: str, dtype: torch.dtype, where: RowIndex) -> None:
        self.name, self.dtype, self._where = name, dtype, where

    def __len__(self) -> int:
        return len(self._where.shard)

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """The shapes of samples; a single one unless samples differ in size."""
        used = (self._where.shards[shard].about["shapes"] for shard in np.unique(self._where.shard))
        return {tuple(shapes[self.name]) for shapes in used if self.name in shapes}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole column as one tensor, ``(samples, ...)``.

        Raises:
            ReadError: The samples have different shapes.
        """
        (shape,) = self._one_shape(self.shapes)
        return (len(self), *shape)

    def _one_shape(self, shapes: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
        if len(shapes) != 1:
            some = ", ".join(map(str, sorted(shapes)[:4]))
            raise ReadError(
                f"the samples' values of {self.name!r} have {len(shapes)} shapes and cannot be one tensor ({some}); "
                "read them one by one, or pool them during extraction"
            )
        return shapes

    def __getitem__(self, which: int | slice | Sequence[int]) -> Tensor:
        """Return the values of one sample, or of several as one tensor."""
        if isinstance(which, (int, np.integer)):
            if not -len(self) <= which < len(self):
                raise IndexError(f"{self.name!r} has the values of {len(self)} samples; there is no {which}")
            ((_, values),) = self._read(np.array([which % len(self)]))
            return values[0]
        numbers = np.arange(len(self))[which if isinstance(which, slice) else np.asarray(which)]
        return self._several(numbers)

    def __iter__(self) -> Iterator[Tensor]:
        step = 1024
        for start in range(0, len(self), step):
            found: dict[int, Tensor] = {}
            for which, values in self._read(np.arange(start, min(start + step, len(self)))):
                found |= zip(which.tolist(), values, strict=True)
            yield from (found[number] for number in sorted(found))

    def _read(self, numbers: Numbers) -> Iterator[tuple[Numbers, Tensor]]:
        """Yield the values of some samples, shard by shard, as `RowIndex.read` does."""
        for which, values in self._where.read(self.name, numbers):
            if values.dtype != self.dtype:
                raise NotFeatures(
                    f"the values of {self.name!r} are of {values.dtype} in a shard and of {self.dtype} in the manifest: one "
                    "of the two has changed; extract the features again into another folder"
                )
            yield which, values

    def tensor(self) -> Tensor:
        """Return the whole column."""
        return self._several(np.arange(len(self)))

    def numpy(self) -> NDArray[Any]:
        """Return the whole column as an array; bfloat16, which NumPy lacks, becomes float32."""
        values = self.tensor()
        array: NDArray[Any] = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=bool(copy))

    def _several(self, numbers: Numbers) -> Tensor:
        if not len(numbers):
            return torch.empty(0, *self.shape[1:], dtype=self.dtype)
        values: Tensor | None = None
        for which, found in self._read(numbers):
            if values is None:
                values = torch.empty(len(numbers), *found.shape[1:], dtype=self.dtype)
            self._one_shape({tuple(values.shape[1:]), tuple(found.shape[1:])})
            values[torch.from_numpy(which)] = found
        assert values is not None  # noqa: S101 - there are numbers, so something was read
        return values

    def __repr__(self) -> str:
        return f"Column({self.name!r}, {len(self):,} samples, {str(self.dtype).removeprefix('torch.')})"
