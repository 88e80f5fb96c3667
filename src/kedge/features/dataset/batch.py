"""The data of an extraction: samples with their places and keys, then their features.

# Note [Place and key]
A sample's *place* is its position in the data: its index in a data set, or its number in a stream.
A continued run finds finished samples by their places, and places define the order of samples. A
sample's *key* is the user's name for it; without `keys=` it is the place. Both are text.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
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


def bad(place: str, error: Exception) -> FailedSample:
    """Return a failure as text, which every worker can send."""
    return FailedSample(place, place, why(error), "".join(traceback.format_exception(error)))


def why(error: BaseException) -> str:
    """Return an error's type and first line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class SampleBatch(NamedTuple):
    """Some samples, as a loader yields them and a model takes them.

    Attributes:
        places: The samples' places in the data; see Note [Place and key].
        keys: The samples' keys; the places until they get some.
        data: The loader's batch; None without samples.
        bad: Samples that could not be loaded.
        fields: What is stored beside their features, by name.
    """

    places: list[str]
    keys: list[str]
    data: Any
    bad: list[FailedSample]
    fields: Mapping[str, FieldValues] = {}

    def only(self, rows: Sequence[int]) -> Self:
        """Return some of the samples, with their part of the data."""
        return self._replace(
            places=[self.places[row] for row in rows],
            keys=[self.keys[row] for row in rows],
            data=narrowed(self.data, rows, len(self.places)),
            fields=_chosen(self.fields, rows),
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
        failed = [one for one in self.bad if one.place not in places]
        rest = [row for row, place in enumerate(self.places) if place not in places]
        if not rest:
            return self._replace(places=[], keys=[], values={}, bad=failed, fields={})
        return self._replace(
            places=[self.places[row] for row in rest],
            keys=[self.keys[row] for row in rest],
            values={name: value[rest] for name, value in self.values.items()},
            bad=failed,
            fields=_chosen(self.fields, rest),
        )


def _chosen(fields: Mapping[str, FieldValues], rows: Sequence[int]) -> dict[str, FieldValues]:
    chosen: dict[str, FieldValues] = {}
    for name, value in fields.items():
        if isinstance(value, Tensor):
            chosen[name] = value[list(rows)]
        else:
            chosen[name] = [value[row] for row in rows]
    return chosen


def bytes_of(values: FieldValues) -> int:
    """Return the bytes that values take."""
    return values.nbytes if isinstance(values, Tensor) else sum(map(len, values))


class VisitedPlaces:
    """A set of places: a bit for each index of a data set, and a set of strings for other places.

    Args:
        length: The number of samples in the data set; None if unknown.
    """

    def __init__(self, length: int | None = None) -> None:
        self._length = length or 0
        self._bits = bytearray(self._length // 8 + 1)
        self._others: set[str] = set()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, place: str | int) -> bool:
        index = self._index(place)
        if index is None:
            return str(place) in self._others
        return bool(self._bits[index >> 3] >> (index & 7) & 1)

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
            index = place
        else:
            place = str(place)
            is_number = place.isascii() and place.isdecimal() and len(place) < 16
            if not is_number or (place[0] == "0" and place != "0"):
                return None
            index = int(place)
        return index if 0 <= index < self._length else None


def called_with(data: Any, left_out: Container[str] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as arguments: a dict holds keyword arguments, and the first entry of a tuple or list counts.

    Args:
        data: The batch.
        left_out: The entries of a dict that are no arguments.
    """
    if isinstance(data, Mapping):
        return (), {name: value for name, value in data.items() if name not in left_out}
    if isinstance(data, (tuple, list)) and len(data):
        return called_with(data[0])
    return (data,), {}


def moved(data: Any, device: torch.device | None) -> Any:
    """Return a batch with its tensors on a device; arrays become tensors."""

    def move(value: Any) -> Any:
        tensor = torch.as_tensor(value)
        return tensor if device is None else tensor.to(device, non_blocking=True)

    return _mapped(data, move)


def _mapped(data: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(data, (Tensor, np.ndarray)):
        return change(data)
    if isinstance(data, Mapping):
        return {key: _mapped(value, change) for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        return _like(data, [_mapped(value, change) for value in data])
    return data


def _like(data: tuple[Any, ...] | list[Any], parts: list[Any]) -> Any:
    """Return parts as a tuple, a named one or a list, as the data are."""
    return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)


def narrowed(data: Any, rows: Sequence[int], size: int) -> Any:
    """Return some samples of a batch: rows of entries with one row per sample, and all other entries unchanged."""
    if isinstance(data, (Tensor, np.ndarray)):
        return data[list(rows)] if data.ndim and len(data) == size else data
    if isinstance(data, Mapping):
        return {key: narrowed(value, rows, size) for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        if len(data) == size and _is_of_samples(data):
            return type(data)(data[row] for row in rows)
        return _like(data, [narrowed(value, rows, size) for value in data])
    return data


def _is_of_samples(data: list[Any] | tuple[Any, ...]) -> bool:
    """Whether as many entries as there are samples are one for each; PyTorch collates texts to a tuple."""
    if isinstance(data, tuple):
        return all(isinstance(value, str) for value in data) and not hasattr(data, "_fields")
    return not any(isinstance(value, (Tensor, np.ndarray)) for value in data)


def size_of(data: Any) -> int | None:
    """Return the number of samples in a batch: the rows of its first tensor or array; None without one."""
    return next((len(value) for value in arrays(data) if value.ndim), None)


def arrays(data: Any) -> Iterator[Any]:
    """Yield the tensors and arrays of a batch."""
    if isinstance(data, (Tensor, np.ndarray)):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from arrays(value)
    elif isinstance(data, (tuple, list)):
        for value in data:
            yield from arrays(value)
