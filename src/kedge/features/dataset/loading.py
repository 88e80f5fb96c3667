"""The batches of any loader with the places of their samples, without finished samples and those of other ranks.

# Note [The loader's own order]
A loader over a map-style data set is rebuilt with the same data set, sampler, workers and collate
function, so that each sample carries its index and finished samples are not even loaded. A batch
without finished samples stays unchanged, so a continued run computes the batches that the first run
would have. The remaining samples of other batches are combined into full batches; otherwise a
shuffled loader would end with batches of one. `drop_last` is ignored: every sample is computed. An
index that a sampler returns twice is loaded once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from kedge.errors import ExtractionFailed
from kedge.features.dataset.batch import (
    FailedSample,
    SampleBatch,
    VisitedPlaces,
    arrays,
    bad,
    narrowed,
    size_of,
    why,
)
from kedge.features.dataset.options import SharingRank


@dataclass
class BatchSource:
    """The batches of a loader, with a place for each sample.

    Attributes:
        loader: A `DataLoader`, or any iterable of batches.
        rank: This process's share of the samples.
        split: Whether the loader yields all samples at every rank, so that ranks must share them
            out.
        in_batches: Whether a loader with ``batch_size=None`` is known to yield batches.
        done: The finished samples, which are not loaded again if their places are known beforehand.
    """

    loader: Any
    rank: SharingRank = field(default_factory=SharingRank)
    split: bool = True
    done: VisitedPlaces = field(default_factory=VisitedPlaces)
    in_batches: bool = False

    @property
    def length(self) -> int | None:
        """The number of samples in the data set, or None if unknown."""
        if not is_loader(self.loader) or is_stream(self.loader):
            return None
        return len(self.loader.dataset)

    @property
    def left(self) -> int | None:
        """The approximate number of samples left for this rank, or None if unknown."""
        length = self.length
        if length is None:
            return None
        sampler = getattr(self.loader.batch_sampler, "sampler", self.loader.dataset)
        drawn = len(sampler) if hasattr(sampler, "__len__") else length
        if isinstance(sampler, DistributedSampler):
            drawn *= sampler.num_replicas  # the number at all ranks
        left = max(0, min(length, drawn) - len(self.done))
        if self.split or _is_distributed(self.loader):
            return -(-left // self.rank.world)
        return left

    def __iter__(self) -> Iterator[SampleBatch]:
        """Return an iterator over the loader's batches."""
        loader = self.loader
        if not is_loader(loader):
            return self._plain()
        collate = SafeCollate(loader.collate_fn)
        if not is_stream(loader):
            dataset = PlacedDataset(loader.dataset)
            indices = BatchIndices(self)
            return iter(_anew(loader, dataset, collate, batch_sampler=indices))
        rank = self.rank if self.split else None
        numbered = Numbered(loader.dataset, self.done, rank, self._prefix)
        return iter(_anew(loader, numbered, collate, batch_size=loader.batch_size))

    def _plain(self) -> Iterator[SampleBatch]:
        """Yield the batches of any iterable; only a loaded batch shows whether its samples are finished."""
        start = 0
        for number, data in enumerate(self.loader):
            size = size_of(data)
            if size is None:
                raise ExtractionFailed(
                    f"batch {number} of the loader holds no tensor, so its number of "
                    "samples is unknown; give a DataLoader, or batches of tensors"
                )
            if number == 0 and _does_not_batch(self.loader) and not self.in_batches:
                first = next(arrays(data))
                if is_one_sample(data) or first.ndim == 1:
                    raise ExtractionFailed(
                        "the loader has batch_size=None, and its first item, with a "
                        f"tensor of shape {list(first.shape)}, looks like one sample; "
                        f"{_TELL}"
                    )
            places = [f"{self._prefix}{place}" for place in range(start, start + size)]
            start += size
            if self.split and not self.rank.takes(number):
                continue
            rest = [row for row, place in enumerate(places) if place not in self.done]
            if len(rest) < size:
                places = [places[row] for row in rest]
                data = narrowed(data, rest, size)  # noqa: PLW2901 - or the whole batch stays in memory
            if rest:
                yield SampleBatch(places, places, data, [])

    @property
    def _prefix(self) -> str:
        """The prefix of this rank's sample numbers if each rank has a stream of its own; else empty."""
        return "" if self.split or self.rank.world == 1 else f"{self.rank.rank}/"


def sample_by_sample(loader: Any, items: str | None = None) -> Any:
    """Return a loader that yields batches; one that does not batch is rebuilt if its items are samples.

    Args:
        loader: A `DataLoader`, or any iterable of batches.
        items: "samples" or "batches", for a ``DataLoader(batch_size=None)``; None to read it from
            the items.

    Raises:
        ExtractionFailed: If items of a map-style data set may be either.
    """
    if not _does_not_batch(loader):
        if items is not None:
            raise ExtractionFailed(
                f"items={items!r} (--items) is for a DataLoader with batch_size=None, "
                "and this loader is another; leave it out"
            )
        return loader
    if items is None and not is_stream(loader):
        items = _read_items(loader)
    if items != "samples":
        return loader
    sampling = {} if is_stream(loader) else {"sampler": loader.sampler}
    collate = _OneSample(loader.collate_fn)
    return _anew(loader, loader.dataset, collate, batch_size=1, **sampling)


def _does_not_batch(loader: Any) -> bool:
    return _is_pytorchs(loader) and loader.batch_sampler is None


def _is_pytorchs(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def _read_items(loader: Any) -> str:
    if isinstance(loader.sampler, BatchSampler):
        return "batches"
    first: Any = 0
    if type(loader.sampler).__module__.partition(".")[0] != "torch":
        first = next(iter(loader.sampler), 0)
    if isinstance(first, (list, tuple)):
        return "batches"
    try:
        item = loader.dataset[first]
    except Exception as error:
        raise ExtractionFailed(
            f"the data set gave no item {first!r}: {why(error)}; {_TELL}"
        ) from error
    if is_one_sample(item):
        return "samples"
    raise ExtractionFailed(
        "the loader has batch_size=None, and an item may be a sample or a batch of "
        f"samples; {_TELL}"
    )


_TELL = (
    "give the DataLoader a batch_size, or say which with items='samples' or "
    "items='batches' (--items); any other iterable of batches needs no such word"
)


def is_one_sample(item: Any) -> bool:
    """Whether an item of a data set has a number or a text in it, which a batch has not."""
    values = [item]
    if isinstance(item, Mapping):
        values = list(item.values())
    elif isinstance(item, (tuple, list)):
        values = list(item)
    for value in values:
        if isinstance(value, (int, float, str, np.generic)):
            return True
        if isinstance(value, (np.ndarray, Tensor)) and value.ndim == 0:
            return True
    return False


class _OneSample:
    """The collate function for batches of one sample, whose items the loader's own function has converted."""

    def __init__(self, convert: Any) -> None:
        self.convert = convert

    def __call__(self, items: list[Any]) -> Any:
        """Return a batch of one sample."""
        return default_collate([self.convert(item) for item in items])


def is_loader(loader: Any) -> bool:
    """Whether a loader is a `DataLoader` that batches by itself, so that it can be rebuilt."""
    return _is_pytorchs(loader) and loader.batch_sampler is not None


def is_stream(loader: Any) -> bool:
    """Whether a loader's data set can only be iterated."""
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def _is_distributed(loader: Any) -> bool:
    inner = getattr(loader.batch_sampler, "sampler", None)
    return any(isinstance(one, DistributedSampler) for one in (loader.sampler, inner))


class BatchIndices:
    """The indices of the batches to load; see Note [The loader's own order]."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self._batches: Any = source.loader.batch_sampler
        self._visited = VisitedPlaces(source.length)
        shares = source.split and source.rank.world > 1
        self._divides = shares and not _is_distributed(source.loader)
        self._resumes = len(source.done) > 0
        is_partial = self._divides or self._resumes
        self._whole = not is_partial and _draws_once(source.loader.sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        if type(self._batches) is not BatchSampler:
            for group in self._batches:
                rest = [index for index in group if self._is_left(index)]
                if rest:
                    yield rest
            return

        size = self._batches.batch_size
        indices = iter(_without_padding(self._batches.sampler))
        loose: list[Any] = []
        while group := list(islice(indices, size)):
            if self._whole:
                yield group
                continue
            rest = [index for index in group if self._is_left(index)]
            if len(rest) == len(group):
                yield rest
                continue
            loose += rest
            while len(loose) >= size:
                yield loose[:size]
                loose = loose[size:]
        if loose:
            yield loose

    def _is_left(self, index: Any) -> bool:
        if self._divides:
            # The index decides, because ranks may draw in different orders.
            number = index if isinstance(index, int) else crc32(str(index).encode())
            size = getattr(self._batches, "batch_size", None) or 1
            if not self._source.rank.takes(number // size):
                return False
        place = index if type(index) is int else str(index)
        if self._resumes and place in self._source.done:
            return False
        return self._visited.add(place)


def _without_padding(sampler: Any) -> Iterable[Any]:
    """Return a sampler's indices without those that a `DistributedSampler` repeats to give all ranks equally many."""
    if not isinstance(sampler, DistributedSampler):
        drawn: Iterable[Any] = sampler
        return drawn
    length = len(sampler.dataset)  # type: ignore[arg-type]
    share = max(0, -(-(length - sampler.rank) // sampler.num_replicas))
    return islice(sampler, share)


def _draws_once(sampler: Any) -> bool:
    """Whether a sampler is one of PyTorch's known to return each index at most once."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) is SequentialSampler


def _anew(loader: Any, dataset: Any, collate: Any, **batching: Any) -> DataLoader[Any]:
    workers = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
    return DataLoader(
        dataset,
        num_workers=loader.num_workers,
        collate_fn=collate,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        **workers,
        **batching,
    )


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


class _Wrapped:
    """A data set that shows the attributes of the one in it, for example to a `worker_init_fn`."""

    dataset: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class PlacedDataset(_Wrapped, Dataset[FetchedSamples]):
    """A map-style data set that returns the samples of a batch with their places; it runs in loaders' workers."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: Sequence[Any]) -> FetchedSamples:
        """Return several samples; loaded one by one if the data set has no batch method, or if that fails."""
        together = getattr(self.dataset, "__getitems__", None)
        found: Any = None
        if together is not None:
            try:
                found = together(list(indices))
            except Exception:  # noqa: BLE001 - loading one by one finds the failed sample
                found = None
        if isinstance(found, (list, tuple)) and len(found) == len(indices):
            return FetchedSamples(list(map(str, indices)), list(found), [])

        places = list(map(str, indices))
        contents: list[Any] = []
        failed: list[FailedSample] = []
        for place, index in zip(tuple(places), indices, strict=True):
            try:
                contents.append(self.dataset[index])
            except Exception as error:  # noqa: BLE001 - reported with the sample's key
                failed.append(bad(place, error))
                del places[len(contents)]
        return FetchedSamples(places, contents, failed)

    def __len__(self) -> int:
        return len(self.dataset)


class Numbered(_Wrapped, IterableDataset[Sample]):
    """An iterable data set with numbered samples, without finished samples and those of other ranks.

    Each of several workers has a stream of its own, so the worker's number precedes the sample's,
    as in "1:17".
    """

    def __init__(
        self, dataset: Any, done: VisitedPlaces, rank: SharingRank | None, prefix: str = ""
    ) -> None:
        self.dataset = dataset
        self.done = done
        self.rank = rank
        self.prefix = prefix

    def __iter__(self) -> Iterator[Sample]:
        prefix = self.prefix
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            prefix += f"{worker.id}:"
        number = 0
        samples = iter(self.dataset)
        while True:
            place = f"{prefix}{number}"
            try:
                content = next(samples)
            except StopIteration:
                return
            except Exception as error:  # noqa: BLE001 - as in PlacedDataset; a failed stream has no next sample
                yield Sample(place, None, bad(place, error)._replace(ends=True))
                return
            is_mine = self.rank is None or self.rank.takes(number)
            if is_mine and place not in self.done:
                yield Sample(place, content)
            number += 1


class SafeCollate:
    """The loader's collate function; if it fails, samples with another structure than most count as bad."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: FetchedSamples | Sequence[Sample]) -> SampleBatch:
        """Return the collated batch."""
        if not isinstance(samples, FetchedSamples):
            fetched = FetchedSamples([], [], [])
            for sample in samples:
                if sample.bad is not None:
                    fetched.bad.append(sample.bad)
                else:
                    fetched.places.append(sample.place)
                    fetched.contents.append(sample.content)
            samples = fetched
        places, contents, failed = samples
        while contents:
            try:
                data = self.collate(list(contents))  # a copy, because collate may change its list
            except Exception as error:
                odd = _unlike(contents)
                if not odd:
                    raise
                failed += [bad(places[row], error) for row in odd]
                rest = [row for row in range(len(places)) if row not in odd]
                places = [places[row] for row in rest]
                contents = [contents[row] for row in rest]
            else:
                return SampleBatch(places, places, data, failed)
        return SampleBatch([], [], None, failed)


def _unlike(contents: Sequence[Any]) -> list[int]:
    """Return the rows of the samples with another structure than most."""
    made = [_structure(content) for content in contents]
    (usual, _), *_ = Counter(made).most_common()
    return [row for row, make in enumerate(made) if make != usual]


def _structure(content: Any) -> Any:
    if isinstance(content, (Tensor, np.ndarray)):
        return tuple(content.shape), content.dtype
    if isinstance(content, Mapping):
        return tuple((key, _structure(value)) for key, value in content.items())
    if isinstance(content, (tuple, list)):
        return tuple(map(_structure, content))
    return type(content)
