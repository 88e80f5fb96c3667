"""What the user names: the samples' keys, the fields that are stored with them, and the values to reduce.

# Note [Names and the first batch]
A value's name can depend on the first batch: `"encoder"` is a name if the module ran once,
`"encoder#0"` if it ran several times. A reducer under an impossible name would silently count
nothing, so such names are refused before the first batch; the other names are checked after the
first batch is computed, before anything is written. Later batches must have the same names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.errors import ExtractionFailed
from kedge.features.capture import may_be
from kedge.features.dataset.batch import FieldValues, SampleBatch, why

#: The name of the field that labels= stores.
LABELS = "labels"

Field = bool | int | str | Callable[[Any], Any]
"""Where a batch has a field: the index or the name of an entry, or a function of the batch; True for the second entry."""

_SHOWN = 8


class SampleKeys:
    """The assignment of a unique key to each sample.

    Args:
        keys: A sequence with a key for each sample, a function from a batch to its keys, or None
            for the places.
        length: The number of samples in the data set; None if unknown.
        taken: The place and the key of each finished sample.

    Raises:
        ExtractionFailed: Two samples share a key, or the number of keys differs from that of
            samples.
    """

    def __init__(
        self,
        keys: Sequence[Any] | Callable[[Any], Sequence[Any]] | None,
        length: int | None = None,
        taken: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._of_batch: Callable[[Any], Any] | None = None
        self._all: list[str] | None = None
        self._places: dict[str, str] = {}
        if callable(keys):
            self._of_batch = keys
            self._places = {key: place for place, key in taken}
        elif keys is not None:
            self._all = texts(keys)
            if length is not None and len(self._all) != length:
                raise ExtractionFailed(
                    f"keys= has {len(self._all)} entries and the data set {length} samples"
                )
            self._assign(map(str, range(len(self._all))), self._all)
            self._places.clear()

    def __call__(self, batch: SampleBatch) -> SampleBatch:
        """Return the samples of a batch with their keys."""
        if self._of_batch is not None:
            if not batch.places:
                return batch
            keys = self._made_of(batch, self._of_batch)
            self._assign(batch.places, keys)
        elif self._all is not None:
            keys = [self._listed(place) for place in batch.places]
            bad = [one._replace(key=self._listed(one.place)) for one in batch.bad]
            batch = batch._replace(bad=bad)
        else:
            return batch
        return batch._replace(keys=keys)

    def _listed(self, place: str) -> str:
        known = self._all or []
        if not place.isdecimal() or int(place) >= len(known):
            raise ExtractionFailed(
                f"keys= has {len(known)} entries but none for the sample at {place}; "
                "for a stream, give a function that reads the keys from a batch"
            )
        return known[int(place)]

    def _made_of(self, batch: SampleBatch, function: Callable[[Any], Any]) -> list[str]:
        failed = (
            f"keys= failed for the batch that begins with sample {batch.places[0]} of "
            f"the data set: {name_of(function)}"
        )
        try:
            found = function(batch.data)
        except Exception as error:
            raise ExtractionFailed(
                f"{failed} raised {why(error)}; fix it, and name another folder"
            ) from error
        is_text = isinstance(found, (str, bytes))
        if is_text or not (hasattr(found, "tolist") or isinstance(found, Iterable)):
            raise ExtractionFailed(
                f"{failed} returned a {type(found).__name__}; return a key for each sample"
            )
        keys = texts(found)
        if len(keys) != len(batch.places):
            raise ExtractionFailed(
                f"keys= returned {len(keys)} keys for a batch of {len(batch.places)} samples"
            )
        return keys

    def _assign(self, places: Iterable[str], keys: Iterable[str]) -> None:
        for place, key in zip(places, keys, strict=True):
            other = self._places.setdefault(key, place)
            if other != place:
                raise ExtractionFailed(
                    f"the key {key!r} belongs to two samples, at {other} and at "
                    f"{place} of the data set; each sample needs a key of its own"
                )


def texts(keys: Any) -> list[str]:
    """Return keys as strings."""
    if hasattr(keys, "tolist"):
        keys = keys.tolist()
    return [str(key) for key in keys]


def name_of(made: Any) -> str:
    """Return the name of a function, or of an object's class."""
    return str(getattr(made, "__name__", type(made).__name__))


class BatchFields:
    """The extraction of fields from batches; it can be pickled.

    Args:
        wanted: For each field where a batch has it.
    """

    def __init__(self, wanted: Mapping[str, Field]) -> None:
        self.wanted = dict(wanted)

    def __call__(self, batch: SampleBatch) -> SampleBatch:
        """Return a batch with its fields.

        Raises:
            ExtractionFailed: A batch does not have a field with one entry for each sample.
        """
        if not self.wanted or not batch.places:
            return batch
        fields = {}
        for name, field in self.wanted.items():
            shown = name_of(field) if callable(field) else repr(field)
            option = f"fields={{{name!r}: {shown}}}"
            if name == LABELS:
                option = f"labels={shown}"
            found = _entry(batch, entry_of(field), option)
            fields[name] = _values(found, len(batch.places), option)
        return batch._replace(fields=fields)

    @property
    def entries(self) -> frozenset[str]:
        """The names of entries of a batch that are fields."""
        named = [field for field in self.wanted.values() if isinstance(field, str)]
        return frozenset(named)


def entry_of(field: Field) -> int | str | Callable[[Any], Any]:
    """Return the index, the name or the function of a field: True is the second entry."""
    return 1 if field is True else field


def _entry(batch: SampleBatch, entry: int | str | Callable[[Any], Any], option: str) -> Any:
    data = batch.data
    if callable(entry):
        try:
            return entry(data)
        except Exception as error:
            raise ExtractionFailed(
                f"{option} failed for the batch that begins with sample "
                f"{batch.places[0]} of the data set: {why(error)}; fix it, and name "
                "another folder"
            ) from error
    if isinstance(entry, str):
        if isinstance(data, Mapping) and entry in data:
            return data[entry]
        if entry in getattr(data, "_fields", ()):
            return getattr(data, entry)
    elif isinstance(data, (tuple, list)) and -len(data) <= entry < len(data):
        return data[entry]

    there = f"it is a {type(data).__name__}"
    if isinstance(data, Mapping):
        there = f"it has {', '.join(map(repr, data))}"
    elif isinstance(data, (tuple, list)):
        there = f"it has {len(data)} entries, from 0 to {len(data) - 1}"
        if len(data) < 2:
            there = "its only entry is 0" if data else "it is empty"
    raise ExtractionFailed(
        f"{option}: a batch has no such entry: {there}; name an entry, or give a "
        "function of the batch"
    )


def _values(found: Any, count: int, option: str) -> FieldValues:
    """Return a field as a tensor in memory of its own, or as texts."""
    is_array = isinstance(found, (Tensor, np.ndarray))
    if is_array and found.ndim and len(found) == count:
        if isinstance(found, Tensor):
            return found.detach().to("cpu", copy=True).contiguous()
        if found.dtype.kind in "biufc":
            return _numbers(found)
        return _of_objects(found.tolist(), option)
    if isinstance(found, Iterable) and not (is_array or isinstance(found, (str, bytes, Mapping))):
        objects = list(found)
        if len(objects) == count:
            return _of_objects(objects, option)

    shape = f"{list(found.shape)}" if is_array else f"one {type(found).__name__}"
    if isinstance(found, (list, tuple)):
        shape += f" of {len(found)}"
    raise ExtractionFailed(f"{option} gave {shape} for a batch of {count} samples: each needs one")


def _of_objects(objects: Sequence[Any], option: str) -> FieldValues:
    """Return objects, one for each sample, as a tensor or as texts."""
    if all(isinstance(each, (str, os.PathLike)) for each in objects):
        return [os.fspath(each) for each in objects]
    try:
        if all(isinstance(each, Tensor) for each in objects):
            return torch.stack([each.detach().cpu() for each in objects])
        return _numbers(np.asarray(objects))
    except (ValueError, TypeError, RuntimeError) as error:
        kinds = ", ".join(sorted({type(each).__name__ for each in objects}))
        raise ExtractionFailed(
            f"{option} gave {kinds} that are neither texts nor numbers of one shape "
            f"({why(error)}); give a function of the batch that returns such"
        ) from error


def _numbers(array: Any) -> Tensor:
    if array.dtype.kind not in "biufc":
        raise TypeError(f"NumPy's type of them is {array.dtype}")
    return torch.from_numpy(np.array(array))


def must_be_possible(features: Any, reduce: Iterable[str]) -> None:
    """Check, before the first batch, that values can have these names; features not from Kedge pass.

    Raises:
        ExtractionFailed: A name cannot belong to a value.
    """
    wanted = getattr(features, "wanted", None)
    work = getattr(features, "work", None)
    if wanted is None or work is None:
        return
    known = {wanted.rename.get(text, text) for text in wanted.texts}
    known |= set(wanted.rename.values())
    paths: set[str] = set()
    for hooked in work.hooks:
        paths |= {tap.site.path for tap in hooked.taps}
    for name in reduce:
        if name not in known and (name in wanted.rename or not may_be(name, paths)):
            raise _unknown_name(name, list(features.names), wanted.rename.get(name))


def must_be_names(reduce: Iterable[str], names: Iterable[str]) -> None:
    """Check that values have these names.

    Raises:
        ExtractionFailed: A name does not belong to a value.
    """
    there = list(names)
    for name in reduce:
        if name not in there:
            raise _unknown_name(name, there)


def _unknown_name(name: str, there: Sequence[str], new: str | None = None) -> ExtractionFailed:
    shown = ", ".join(map(repr, there[:_SHOWN]))
    if len(there) > _SHOWN:
        shown += f" and {len(there) - _SHOWN} more"
    renamed = f", as it was renamed to {new!r}" if new else ""
    return ExtractionFailed(
        f"reduce: no value has the name {name!r}{renamed}; the names are {shown}: name one of these"
    )
