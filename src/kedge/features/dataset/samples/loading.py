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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from kedge.errors import ExtractionFailed
from kedge.features.dataset.ranks import SharingRank
from kedge.features.dataset.samples.batch import VisitedPlaces
from kedge.features.dataset.samples.inputs import arrays, narrowed, size_of
from kedge.features.dataset.samples.placed import (
    LoadedBatch,
    Numbered,
    PlacedDataset,
    SafeCollate,
    why,
)


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
        share = self.rank.world if self.split or _is_distributed(self.loader) else 1
        return max(0, -(-(min(length, _drawn(self.loader)) - len(self.done)) // share))

    def __iter__(self) -> Iterator[LoadedBatch]:
        """Return an iterator over the loader's batches."""
        if not is_loader(self.loader):
            return self._plain()
        return iter(self._stream() if is_stream(self.loader) else self._indexed())

    def _indexed(self) -> DataLoader[Any]:
        return _anew(
            self.loader,
            PlacedDataset(self.loader.dataset),
            self._collate,
            batch_sampler=BatchIndices(self),
        )

    def _stream(self) -> DataLoader[Any]:
        numbered = Numbered(
            self.loader.dataset, self.done, self.rank if self.split else None, self._prefix
        )
        return _anew(self.loader, numbered, self._collate, batch_size=self.loader.batch_size)

    def _plain(self) -> Iterator[LoadedBatch]:
        """Yield the batches of any iterable; only a loaded batch shows whether its samples are finished."""
        start = 0
        for number, data in enumerate(self.loader):
            size = size_of(data)
            if size is None:
                raise ExtractionFailed(
                    f"batch {number} of the loader holds no tensor, so its number of samples is unknown; give a "
                    "DataLoader, or batches of tensors"
                )
            if number == 0 and _does_not_batch(self.loader) and not self.in_batches:
                _see_that_it_is_a_batch(data)
            places = [f"{self._prefix}{place}" for place in range(start, start + size)]
            start += size
            if self.split and not self.rank.takes(number):
                continue
            rest = [row for row, place in enumerate(places) if place not in self.done]
            if rest:
                left = data if len(rest) == size else narrowed(data, rest, size)
                yield LoadedBatch([places[row] for row in rest], left, [])

    @property
    def _collate(self) -> SafeCollate:
        return SafeCollate(self.loader.collate_fn)

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
                f"items={items!r} (--items) is for a DataLoader with batch_size=None, and this loader is another; leave it out"
            )
        return loader
    if items is None and not is_stream(loader):
        items = _read_items(loader)
    if items != "samples":
        return loader
    sampling = {} if is_stream(loader) else {"sampler": loader.sampler}
    return _anew(loader, loader.dataset, _OneSample(loader.collate_fn), batch_size=1, **sampling)


def _does_not_batch(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_sampler is None
    )


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
        f"the loader has batch_size=None, and an item may be a sample or a batch of samples; {_TELL}"
    )


_TELL = (
    "give the DataLoader a batch_size, or say which with items='samples' or items='batches' (--items); any other iterable of "
    "batches needs no such word"
)


def _see_that_it_is_a_batch(data: Any) -> None:
    first = next(arrays(data))
    if is_one_sample(data) or first.ndim == 1:
        raise ExtractionFailed(
            f"the loader has batch_size=None, and its first item, with a tensor of shape {list(first.shape)}, looks like one "
            f"sample; {_TELL}"
        )


def is_one_sample(item: Any) -> bool:
    """Whether an item of a data set has a number or a text in it, which a batch has not."""
    values = [item]
    if isinstance(item, Mapping):
        values = list(item.values())
    elif isinstance(item, (tuple, list)):
        values = list(item)
    return any(
        isinstance(value, (int, float, str, np.generic)) or np.ndim(value) == 0
        for value in values
        if _is_plain(value)
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, np.generic, np.ndarray, Tensor))


class _OneSample:
    """The collate function for batches of one sample, whose items the loader's own function has converted."""

    def __init__(self, convert: Any) -> None:
        self.convert = convert

    def __call__(self, items: list[Any]) -> Any:
        """Return a batch of one sample."""
        return default_collate([self.convert(item) for item in items])


def is_loader(loader: Any) -> bool:
    """Whether a loader is a `DataLoader` that batches by itself, so that it can be rebuilt."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_sampler is not None
    )


def is_stream(loader: Any) -> bool:
    """Whether a loader's data set can only be iterated."""
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


class BatchIndices:
    """The indices of the batches to load; see Note [The loader's own order]."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self._batches: Any = source.loader.batch_sampler
        self._visited = VisitedPlaces(source.length)
        self._divides = (
            source.split and source.rank.world > 1 and not _is_distributed(source.loader)
        )
        self._resumes = len(source.done) > 0
        self._whole = not self._divides and not self._resumes and _draws_once(source.loader.sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        stock = type(self._batches) is BatchSampler
        loose: list[Any] = []
        for group in self._stock() if stock else self._batches:
            if stock and self._whole:
                yield group
                continue
            rest = [index for index in group if self._is_left(index)]
            if len(rest) == len(group) or not stock:
                yield from filter(None, [rest])
                continue
            loose += rest
            while len(loose) >= self._batches.batch_size:
                yield loose[: self._batches.batch_size]
                loose = loose[self._batches.batch_size :]
        if loose:
            yield loose

    def _stock(self) -> Iterator[list[Any]]:
        indices = iter(_without_padding(self._batches.sampler))
        while group := list(islice(indices, self._batches.batch_size)):
            yield group

    def _is_left(self, index: Any) -> bool:
        place = index if type(index) is int else str(index)
        if self._divides and not self._is_mine(index):
            return False
        return not (self._resumes and place in self._source.done) and self._visited.add(place)

    def _is_mine(self, index: Any) -> bool:
        """Whether a sample belongs to this rank; the index decides, because ranks may draw in different orders."""
        number = index if isinstance(index, int) else crc32(str(index).encode())
        return self._source.rank.takes(number // (getattr(self._batches, "batch_size", None) or 1))


def _without_padding(sampler: Any) -> Iterable[Any]:
    """Return a sampler's indices without those that a `DistributedSampler` repeats to give all ranks equally many."""
    if not isinstance(sampler, DistributedSampler):
        drawn: Iterable[Any] = sampler
        return drawn
    length = len(sampler.dataset)  # type: ignore[arg-type]
    return (
        index for i, index in enumerate(sampler) if sampler.rank + i * sampler.num_replicas < length
    )


def _draws_once(sampler: Any) -> bool:
    """Whether a sampler is one of PyTorch's known to return each index at most once."""
    return type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples <= len(sampler.data_source)
    )


def _splits_by_rank(sampler: Any) -> bool:
    return isinstance(sampler, DistributedSampler)


def _is_distributed(loader: Any) -> bool:
    return _splits_by_rank(loader.sampler) or _splits_by_rank(
        getattr(loader.batch_sampler, "sampler", None)
    )


def _drawn(loader: Any) -> int:
    """Return the number of samples that a loader's sampler draws, summed over ranks."""
    sampler = (
        loader.batch_sampler.sampler if hasattr(loader.batch_sampler, "sampler") else loader.dataset
    )
    count = len(sampler) if hasattr(sampler, "__len__") else len(loader.dataset)
    return count * sampler.num_replicas if _splits_by_rank(sampler) else count


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
