"""What comes with the samples of a batch and is stored beside their features: labels, paths, targets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.errors import ExtractionFailed
from kedge.features.dataset.samples.batch import FieldValues
from kedge.features.dataset.samples.names import name_of
from kedge.features.dataset.samples.placed import LoadedBatch, why

#: The name of the field that labels= stores.
LABELS = "labels"

Field = bool | int | str | Callable[[Any], Any]
"""Where a batch has a field: the index or the name of an entry, or a function of the batch; True for the second entry."""


class BatchFields:
    """The extraction of fields from batches; it can be pickled.

    Args:
        wanted: For each field where a batch has it.
    """

    def __init__(self, wanted: Mapping[str, Field]) -> None:
        self.wanted = dict(wanted)

    def __call__(self, loaded: LoadedBatch) -> LoadedBatch:
        """Return a batch with its fields.

        Raises:
            ExtractionFailed: A batch does not have a field with one entry for each sample.
        """
        if not self.wanted or not loaded.places:
            return loaded
        count, first = len(loaded.places), loaded.places[0]
        fields = {
            name: _values(_found(loaded.data, name, field, first), count, _option(name, field))
            for name, field in self.wanted.items()
        }
        return loaded._replace(fields=fields)

    @property
    def entries(self) -> frozenset[str]:
        """The names of entries of a batch that are fields."""
        return frozenset(field for field in self.wanted.values() if isinstance(field, str))


def entry_of(field: Field) -> int | str | Callable[[Any], Any]:
    """Return the index, the name or the function of a field: True is the second entry."""
    return 1 if field is True else field


def _option(name: str, field: Field) -> str:
    shown = name_of(field) if callable(field) else repr(field)
    return f"labels={shown}" if name == LABELS else f"fields={{{name!r}: {shown}}}"


def _found(data: Any, name: str, field: Field, first: str) -> Any:
    entry = entry_of(field)
    if callable(entry):
        try:
            return entry(data)
        except Exception as error:
            raise ExtractionFailed(
                f"{_option(name, field)} failed for the batch that begins with sample {first} of the data set: {why(error)}; "
                "fix it, and name another folder"
            ) from error
    if isinstance(entry, str):
        if isinstance(data, Mapping) and entry in data:
            return data[entry]
        if entry in getattr(data, "_fields", ()):
            return getattr(data, entry)
    elif isinstance(data, (tuple, list)) and -len(data) <= entry < len(data):
        return data[entry]
    raise ExtractionFailed(
        f"{_option(name, field)}: a batch has no such entry: {_described(data)}; name an entry, or give a function of the batch"
    )


def _described(data: Any) -> str:
    if isinstance(data, Mapping):
        return f"it has {', '.join(map(repr, data))}"
    if isinstance(data, (tuple, list)):
        return _entries(len(data))
    return f"it is a {type(data).__name__}"


def _entries(count: int) -> str:
    if count < 2:
        return "its only entry is 0" if count else "it is empty"
    return f"it has {count} entries, from 0 to {count - 1}"


def _values(found: Any, count: int, option: str) -> FieldValues:
    """Return a field as a tensor in memory of its own, or as texts."""
    if isinstance(found, (Tensor, np.ndarray)) and found.ndim and len(found) == count:
        if isinstance(found, Tensor):
            return found.detach().to("cpu", copy=True).contiguous()
        return (
            _numbers(found, option)
            if found.dtype.kind in "biufc"
            else _of_objects(found.tolist(), option)
        )
    if isinstance(found, Iterable) and not isinstance(
        found, (str, bytes, Mapping, Tensor, np.ndarray)
    ):
        objects = list(found)
        if len(objects) == count:
            return _of_objects(objects, option)
    shape = (
        f"{list(found.shape)}"
        if isinstance(found, (Tensor, np.ndarray))
        else f"one {type(found).__name__}"
    )
    size = f" of {len(found)}" if isinstance(found, (list, tuple)) else ""
    raise ExtractionFailed(
        f"{option} gave {shape}{size} for a batch of {count} samples: each needs one"
    )


def _of_objects(objects: Sequence[Any], option: str) -> FieldValues:
    """Return objects, one for each sample, as a tensor or as texts."""
    if all(isinstance(each, (str, os.PathLike)) for each in objects):
        return [os.fspath(each) for each in objects]
    try:
        if all(isinstance(each, Tensor) for each in objects):
            return torch.stack([each.detach().cpu() for each in objects])
        return _numbers(np.asarray(objects), option)
    except (ValueError, TypeError, RuntimeError) as error:
        kinds = ", ".join(sorted({type(each).__name__ for each in objects}))
        raise ExtractionFailed(
            f"{option} gave {kinds} that are neither texts nor numbers of one shape ({why(error)}); give a function of the "
            "batch that returns such"
        ) from error


def _numbers(array: Any, option: str) -> Tensor:
    if array.dtype.kind not in "biufc":
        raise TypeError(f"NumPy's type of them is {array.dtype}")
    return torch.from_numpy(np.array(array))
