"""The data of an extraction: samples with their places and keys, then their features.

# Note [Place and key]
A sample's *place* is its position in the data: its index in a data set, or its number in a stream.
A continued run finds finished samples by their places, and places define the order of samples. A
sample's *key* is the user's name for it; without `keys=` it is the place. Both are text.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

FieldValues: TypeAlias = Tensor | list[str]
"""A field of some samples: numbers, samples first, or texts."""


class FailedSample(NamedTuple):
    """A sample without features.

    Attributes:
        place: The sample's place in the data.
        key: The sample's key.
        why: The error, in one line.
        details: The traceback, as Python prints it.
        ends: Whether the sample is the last one, because a stream failed.
    """

    place: str
    key: str
    why: str
    details: str = ""
    ends: bool = False


class SampleBatch(NamedTuple):
    """The input of a model.

    Attributes:
        places: The samples' places in the data; see Note [Place and key].
        keys: The samples' keys.
        data: The loader's batch; None without samples.
        bad: Samples that could not be loaded.
        fields: What is stored beside their features, by name.
    """

    places: list[str]
    keys: list[str]
    data: Any
    bad: list[FailedSample]
    fields: Mapping[str, FieldValues] = {}

    def only(self, rows: Sequence[int], data: Any) -> Self:
        """Return some of the samples, with their part of the data."""
        return self._replace(
            places=[self.places[row] for row in rows],
            keys=[self.keys[row] for row in rows],
            data=data,
            fields=chosen(self.fields, rows),
        )


class Columns(NamedTuple):
    """The features of a batch, on the CPU in memory of their own.

    Attributes:
        places: The samples' places in the data.
        keys: The samples' keys.
        values: For each site ``[samples, ...]``; may be empty without samples.
        bad: Samples without features.
        copied: Events at the ends of copies from devices.
        fields: What is stored beside the features, by name.
    """

    places: list[str]
    keys: list[str]
    values: Mapping[str, Tensor]
    bad: list[FailedSample]
    copied: tuple[torch.Event, ...] = ()
    fields: Mapping[str, FieldValues] = {}

    @property
    def size(self) -> int:
        """The size of the values and fields in bytes."""
        return sum(map(bytes_of, self.values.values())) + sum(map(bytes_of, self.fields.values()))

    def wait(self) -> None:
        """Wait until the values are complete."""
        for event in self.copied:
            event.synchronize()

    def without(self, places: Container[str]) -> Self:
        """Return the samples that are not at these places."""
        rest = [row for row, place in enumerate(self.places) if place not in places]
        return self._replace(
            places=[self.places[row] for row in rest],
            keys=[self.keys[row] for row in rest],
            values={name: value[rest] for name, value in self.values.items()} if rest else {},
            bad=[one for one in self.bad if one.place not in places],
            fields=chosen(self.fields, rest) if rest else {},
        )


def chosen(fields: Mapping[str, FieldValues], rows: Sequence[int]) -> dict[str, FieldValues]:
    """Return the fields of some samples."""
    return {
        name: value[list(rows)] if isinstance(value, Tensor) else [value[row] for row in rows]
        for name, value in fields.items()
    }


def bytes_of(values: FieldValues) -> int:
    """Return the bytes that values take."""
    return values.nbytes if isinstance(values, Tensor) else sum(map(len, values))


class VisitedPlaces:
    """A set of places: a bit for each index of a data set, and a set of strings for other places.

    Args:
        length: The number of samples in the data set; None if unknown.
    """

    def __init__(self, length: int | None = None) -> None:
        self._bits = bytearray((length or 0) // 8 + 1)
        self._length = length or 0
        self._others: set[str] = set()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, place: str | int) -> bool:
        index = self._index(place)
        return (
            str(place) in self._others
            if index is None
            else bool(self._bits[index >> 3] >> (index & 7) & 1)
        )

    def add(self, place: str | int) -> bool:
        """Add a place, given as text or as an index.

        Returns:
            Whether the place is new.
        """
        index = self._index(place)
        if index is None:
            known = str(place) in self._others
            self._others.add(str(place))
        else:
            bit = 1 << (index & 7)
            known = bool(self._bits[index >> 3] & bit)
            self._bits[index >> 3] |= bit
        self._count += not known
        return not known

    def _index(self, place: str | int) -> int | None:
        if type(place) is int:
            return place if 0 <= place < self._length else None
        place = str(place)
        if (
            place.isascii()
            and place.isdecimal()
            and len(place) < 16
            and (place == "0" or place[0] != "0")
        ):
            index = int(place)
            return index if index < self._length else None
        return None
