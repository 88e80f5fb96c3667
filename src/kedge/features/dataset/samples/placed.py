"""A user's data set with a place for each sample, which continues after a failed sample; it runs in loaders' workers."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from kedge.features.dataset.ranks import SharingRank
from kedge.features.dataset.samples.batch import FailedSample, FieldValues, VisitedPlaces


class Sample(NamedTuple):
    """One sample, or the failure in its place."""

    place: str
    content: Any
    bad: FailedSample | None = None


class FetchedSamples(NamedTuple):
    """The samples of a batch before collation.

    Attributes:
        places: Each sample's position in the data.
        contents: The samples.
        bad: The samples that could not be loaded.
    """

    places: list[str]
    contents: list[Any]
    bad: list[FailedSample]


class LoadedBatch(NamedTuple):
    """A batch from a loader: the collated samples, those that failed, and what is stored beside the features."""

    places: list[str]
    data: Any
    bad: list[FailedSample]
    fields: Mapping[str, FieldValues] = {}


def bad(place: str, error: Exception) -> FailedSample:
    """Return a failure as text, which every worker can send."""
    return FailedSample(place, place, why(error), "".join(traceback.format_exception(error)))


def why(error: BaseException) -> str:
    """Return an error's type and first line."""
    first = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class PlacedDataset(Dataset[FetchedSamples]):
    """A map-style data set that returns the samples of a batch with their places."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: Sequence[Any]) -> FetchedSamples:
        """Return several samples; loaded one by one if the data set has no batch method, or if that fails."""
        together = getattr(self.dataset, "__getitems__", None)
        if together is not None:
            try:
                found = together(list(indices))
            except Exception:  # noqa: BLE001 - loading one by one finds the failed sample
                return self._one_by_one(indices)
            if isinstance(found, (list, tuple)) and len(found) == len(indices):
                return FetchedSamples(list(map(str, indices)), list(found), [])
        return self._one_by_one(indices)

    def _one_by_one(self, indices: Sequence[Any]) -> FetchedSamples:
        dataset, failed = self.dataset, dict[int, FailedSample]()
        contents: list[Any] = []
        for index in indices:
            try:
                contents.append(dataset[index])
            except Exception as error:  # noqa: BLE001 - reported with the sample's key
                failed[len(contents) + len(failed)] = bad(str(index), error)
        places = (
            [str(index) for row, index in enumerate(indices) if row not in failed]
            if failed
            else list(map(str, indices))
        )
        return FetchedSamples(places, contents, list(failed.values()))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped data set's attribute, for example to a `worker_init_fn`."""
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class Numbered(IterableDataset[Sample]):
    """An iterable data set with numbered samples, without finished samples and those of other ranks.

    Each of several workers has a stream of its own, so the worker's number precedes the sample's,
    as in "1:17".
    """

    def __init__(
        self, dataset: Any, done: VisitedPlaces, rank: SharingRank | None, prefix: str = ""
    ) -> None:
        self.dataset, self.done, self.rank, self.prefix = dataset, done, rank, prefix

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        several = worker is not None and worker.num_workers > 1
        prefix = self.prefix + (f"{worker.id}:" if worker is not None and several else "")
        number, samples = 0, iter(self.dataset)
        while True:
            place = f"{prefix}{number}"
            try:
                content = next(samples)
            except StopIteration:
                return
            except Exception as error:  # noqa: BLE001 - as in PlacedDataset; a failed stream has no next sample
                yield Sample(place, None, bad(place, error)._replace(ends=True))
                return
            if (self.rank is None or self.rank.takes(number)) and place not in self.done:
                yield Sample(place, content)
            number += 1

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped data set's attribute, as in `PlacedDataset`."""
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class SafeCollate:
    """The loader's collate function; if it fails, samples with another structure than most count as bad."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: FetchedSamples | Sequence[Sample]) -> LoadedBatch:
        """Return the collated batch."""
        places, contents, failed = (
            samples if isinstance(samples, FetchedSamples) else _sorted_out(samples)
        )
        while contents:
            try:
                return LoadedBatch(
                    places, self.collate(list(contents)), failed
                )  # a copy, because collate may change its list
            except Exception as error:
                odd = unlike(contents)
                if not odd:
                    raise
                failed += [bad(places[row], error) for row in odd]
                rest = [row for row in range(len(places)) if row not in odd]
                places, contents = [places[row] for row in rest], [contents[row] for row in rest]
        return LoadedBatch([], None, failed)


def _sorted_out(samples: Sequence[Sample]) -> FetchedSamples:
    good = [sample for sample in samples if sample.bad is None]
    failed = [sample.bad for sample in samples if sample.bad is not None]
    return FetchedSamples(
        [sample.place for sample in good], [sample.content for sample in good], failed
    )


def unlike(contents: Sequence[Any]) -> list[int]:
    """Return the rows of the samples with another structure than most."""
    made = [_make(content) for content in contents]
    (usual, _), *_ = Counter(made).most_common()
    return [row for row, make in enumerate(made) if make != usual]


def _make(content: Any) -> Any:
    if isinstance(content, Tensor):
        return tuple(content.shape), content.dtype
    if isinstance(content, np.ndarray):
        return content.shape, content.dtype
    if isinstance(content, Mapping):
        return tuple((key, _make(value)) for key, value in content.items())
    if isinstance(content, (tuple, list)):
        return tuple(map(_make, content))
    return type(content)
