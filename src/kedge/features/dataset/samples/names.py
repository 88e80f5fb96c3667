"""The names of samples, values and functions, and checks that keys are unique and that reducers' names belong to values.

# Note [Names and the first batch]
A value's name can depend on the first batch: `"encoder"` is a name if the module ran once,
`"encoder#0"` if it ran several times. A reducer under an impossible name would silently count
nothing, so such names are refused before the first batch; the other names are checked after the
first batch is computed, before anything is written. Later batches must have the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kedge.errors import ExtractionFailed
from kedge.features.dataset.samples.batch import SampleBatch
from kedge.features.dataset.samples.placed import LoadedBatch, why
from kedge.features.value_names import may_be

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
        self._of_batch = keys if callable(keys) else None
        self._all = None if keys is None or callable(keys) else texts(keys)
        self._places: dict[str, str] = {}
        if self._all is not None:
            if length is not None and len(self._all) != length:
                raise ExtractionFailed(
                    f"keys= has {len(self._all)} entries and the data set {length} samples"
                )
            self._assign(map(str, range(len(self._all))), self._all)
            self._places.clear()
        if self._of_batch is not None:
            self._places = {key: place for place, key in taken}

    def __call__(self, loaded: LoadedBatch) -> SampleBatch:
        """Return the samples of a batch with their keys."""
        if self._of_batch is None and self._all is None:
            return SampleBatch(loaded.places, loaded.places, loaded.data, loaded.bad, loaded.fields)
        failed = [one._replace(key=self._of_place(one.place)) for one in loaded.bad]
        keys = [self._of_place(place) for place in loaded.places]
        if self._of_batch is not None and keys:
            keys = _keys_of(self._of_batch, loaded)
            if len(keys) != len(loaded.places):
                raise ExtractionFailed(
                    f"keys= returned {len(keys)} keys for a batch of {len(loaded.places)} samples"
                )
            self._assign(loaded.places, keys)
        return SampleBatch(loaded.places, keys, loaded.data, failed, loaded.fields)

    def _of_place(self, place: str) -> str:
        if self._all is None:
            return place
        if not place.isdecimal() or int(place) >= len(self._all):
            raise ExtractionFailed(
                f"keys= has {len(self._all)} entries but none for the sample at {place}; for a stream, give a "
                "function that reads the keys from a batch"
            )
        return self._all[int(place)]

    def _assign(self, places: Iterable[str], keys: Iterable[str]) -> None:
        for place, key in zip(places, keys, strict=True):
            other = self._places.setdefault(key, place)
            if other != place:
                raise ExtractionFailed(
                    f"the key {key!r} belongs to two samples, at {other} and at {place} of the data set; "
                    "each sample needs a key of its own"
                )


def _keys_of(function: Callable[[Any], Any], loaded: LoadedBatch) -> list[str]:
    failed = f"keys= failed for the batch that begins with sample {loaded.places[0]} of the data set: {name_of(function)}"
    try:
        found = function(loaded.data)
    except Exception as error:
        raise ExtractionFailed(
            f"{failed} raised {why(error)}; fix it, and name another folder"
        ) from error
    if isinstance(found, (str, bytes)) or not (
        hasattr(found, "tolist") or isinstance(found, Iterable)
    ):
        raise ExtractionFailed(
            f"{failed} returned a {type(found).__name__}; return a key for each sample"
        )
    return texts(found)


def texts(keys: Any) -> list[str]:
    """Return keys as strings."""
    return [str(key) for key in (keys.tolist() if hasattr(keys, "tolist") else keys)]


def name_of(made: Any) -> str:
    """Return the name of a function, or of an object's class."""
    return str(getattr(made, "__name__", type(made).__name__))


def must_be_possible(features: Any, reduce: Iterable[str]) -> None:
    """Check, before the first batch, that values can have these names; features not from Kedge pass.

    Raises:
        ExtractionFailed: A name cannot belong to a value.
    """
    wanted, work = getattr(features, "wanted", None), getattr(features, "work", None)
    if wanted is None or work is None:
        return
    known = {wanted.rename.get(text, text) for text in wanted.texts} | set(wanted.rename.values())
    paths = {tap.site.path for hooked in work.hooks for tap in hooked.taps}
    for name in reduce:
        if name not in known and (name in wanted.rename or not may_be(name, paths)):
            raise _unknown_name(name, features.names, wanted.rename.get(name))


def must_be_names(reduce: Iterable[str], names: Iterable[str]) -> None:
    """Check that values have these names.

    Raises:
        ExtractionFailed: A name does not belong to a value.
    """
    there = list(names)
    for name in reduce:
        if name not in there:
            raise _unknown_name(name, there)


def _unknown_name(name: str, names: Iterable[str], new: str | None = None) -> ExtractionFailed:
    there = list(names)
    shown = ", ".join(map(repr, there[:_SHOWN])) + (
        f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
    )
    renamed = f", as it was renamed to {new!r}" if new else ""
    return ExtractionFailed(
        f"reduce: no value has the name {name!r}{renamed}; the names are {shown}: name one of these"
    )
