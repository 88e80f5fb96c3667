"""The samples that wait to be written as one shard."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.features.dataset.folder.formats.format import Shard
from kedge.features.dataset.samples.batch import Columns, FailedSample, bytes_of

#: The largest number of samples in a shard, because readers load all its keys at once.
MOST_ROWS = 1 << 17


class PendingShard:
    """The samples of the next shard.

    Attributes:
        size: The bytes of their values.
    """

    def __init__(self) -> None:
        self._places: list[str] = []
        self._keys: list[str] = []
        self._bad: list[FailedSample] = []
        self._columns: dict[str, list[Tensor]] = {}
        self._fields: dict[str, list[Tensor]] = {}
        self._texts: dict[str, list[str]] = {}
        self._since = 0.0
        self.size = 0

    def __bool__(self) -> bool:
        """Return whether there are samples."""
        return bool(self._keys or self._bad)

    @property
    def age(self) -> float:
        """Seconds since the first sample was added."""
        return time.monotonic() - self._since

    @property
    def full(self) -> bool:
        """Whether a shard holds no more samples."""
        return len(self._keys) >= MOST_ROWS

    def takes(self, columns: Columns, values: Mapping[str, Tensor]) -> bool:
        """Return whether a batch has the dtypes and shapes of those before it."""
        fields = {
            name: value for name, value in columns.fields.items() if isinstance(value, Tensor)
        }
        known = {**_shapes(self._columns), **_shapes(self._fields)}
        new = _shapes({name: [value] for name, value in {**values, **fields}.items()})
        return not (known and new) or known == new

    def add(self, columns: Columns, values: Mapping[str, Tensor]) -> None:
        """Add the samples of a batch.

        Args:
            columns: The batch.
            values: Those of its values that are stored.
        """
        if not self:
            self._since = time.monotonic()
        for name, value in values.items():
            self._columns.setdefault(name, []).append(value)
            self.size += value.nbytes
        for name, field in columns.fields.items():
            if isinstance(field, Tensor):
                self._fields.setdefault(name, []).append(field)
            else:
                self._texts.setdefault(name, []).extend(field)
            self.size += bytes_of(field)
        self._places += columns.places
        self._keys += columns.keys
        self._bad += columns.bad

    def content(self, rank: int, number: int) -> Shard:
        """Return the content of the file."""
        about: dict[str, Any] = {
            "keys": self._keys,
            "bad": [[b.place, b.key, b.why] for b in self._bad],
        }
        about |= {"rank": rank, "number": number, "shapes": _sample_shapes(self._columns)}
        if self._fields:
            about["fields"] = _sample_shapes(self._fields)
        if self._texts:
            about["texts"] = self._texts
        if self._places != self._keys:
            about["places"] = self._places
        return Shard(about, {**self._columns, **self._fields})


def _sample_shapes(columns: Mapping[str, Sequence[Tensor]]) -> dict[str, list[int]]:
    return {name: list(pieces[0].shape[1:]) for name, pieces in columns.items()}


def _shapes(columns: Mapping[str, Sequence[Tensor]]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (pieces[0].dtype, pieces[0].shape[1:]) for name, pieces in columns.items()}
