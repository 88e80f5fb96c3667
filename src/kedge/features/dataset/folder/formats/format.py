"""The interface of shard formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Types that only PyTorch has; other formats store them as float32, which contains all their
#: numbers.
WIDENED = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Shard:
    """The contents of one file.

    Attributes:
        about: Its description, of JSON types: keys, places, skipped samples.
        columns: For each site its values, in consecutive pieces.
    """

    about: Mapping[str, Any]
    columns: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The number of samples with features."""
        return len(self.about["keys"])


class OpenValues(Protocol):
    """The values of a site in an open shard, as numbers of their `raw_type`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    #: All of them, if they are in memory, also as a mapped file.
    memory: NDArray[Any] | None

    def rows(self, first: int, last: int) -> NDArray[Any]:
        """Return consecutive rows."""


class OpenShard(Protocol):
    """A shard whose values can be read several times."""

    def values(self, site: str) -> OpenValues:
        """Return the values of a site."""


@dataclass(frozen=True)
class ValuesInMemory:
    """Values that are in memory, or in a mapped file.

    Attributes:
        dtype: Their type.
        memory: The values.
    """

    dtype: torch.dtype
    memory: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, samples first."""
        return self.memory.shape

    def rows(self, first: int, last: int) -> NDArray[Any]:
        """Return consecutive rows."""
        return self.memory[first:last]


class Format(Protocol):
    """Writing and reading of shards; a format has no state."""

    suffix: str
    #: Whether the types in `WIDENED` are stored as wider ones.
    widens: bool
    #: The number of shards of a data set that may be open.
    most_open: int

    def write(self, path: Path, shard: Shard) -> None:
        """Write a shard to a path that does not exist yet."""

    def about(self, path: Path) -> dict[str, Any]:
        """Return a shard's description, without reading its values; under ``sites`` where the format has them."""

    def open(self, path: Path, sites: Mapping[str, Any]) -> OpenShard:
        """Open a shard for reading its values.

        Args:
            path: The shard.
            sites: The entry ``sites`` of its description.
        """


def numpy_pieces(pieces: Sequence[Tensor]) -> list[Any]:
    """Return values as arrays; see `WIDENED`."""
    return [(piece.float() if piece.dtype in WIDENED else piece).numpy() for piece in pieces]


def as_written(values: Any, dtype: str) -> Tensor:
    """Return an array from a file as a tensor of the original dtype."""
    return torch.from_numpy(values).to(getattr(torch, dtype))


@cache
def raw_type(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's type for numbers of a dtype; for one that NumPy lacks, unsigned integers of the same width."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return np.dtype(f"u{dtype.itemsize}")


def as_raw(values: Tensor) -> NDArray[Any]:
    """Return a tensor on the CPU as an array of its `raw_type`, without a copy."""
    kind = raw_type(values.dtype)
    array: NDArray[Any] = (
        values.view(getattr(torch, kind.name)) if values.dtype in WIDENED else values
    ).numpy()
    return array


def as_tensor(values: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return an array of a dtype's `raw_type` as a tensor, without a copy."""
    tensor = torch.from_numpy(values)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
