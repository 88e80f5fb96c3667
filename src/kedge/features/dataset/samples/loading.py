"""The batches of any loader with the places of their samples, without those that are done or another rank's.

# Note [The loader's own order]
A loader over a map-style data set is made anew around the same data set, sampler, workers and function that puts
samples together, so that each sample carries its index and a done one is not even loaded. A batch of which nothing is
done stays as it is, so a run that goes on computes the batches that the first would have; what is left of the others
is put together, or a shuffled loader would end with batches of one. `drop_last` is not followed: every sample is taken.
A sampler that gives an index twice gives it once here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from zlib import crc32

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from kedge.errors import ExtractionFailed
from kedge.features.dataset.ranks import SharingRank
from kedge.features.dataset.samples.batch import VisitedPlaces
from kedge.features.dataset.samples.inputs import narrowed, size_of
from kedge.features.dataset.samples.placed import LoadedBatch, Numbered, PlacedDataset, SafeCollate


@dataclass
class BatchSource:
    """What a loader gives: batches whose samples have places.

    Attributes:
        loader: A `DataLoader`, or any iterable of batches.
        rank: Which part of it is taken.
        split: Whether the loader gives every rank everything.
        done: Which samples are done; not loaded again where that can be told beforehand.
    """

    loader: Any
    rank: SharingRank = field(default_factory=SharingRank)
    split: bool = True
    done: VisitedPlaces = field(default_factory=VisitedPlaces)

    @property
    def length(self) -> int | None:
        """How many samples the data set has, if that can be told."""
        if not is_loader(self.loader) or is_stream(self.loader):
            return None
        return len(self.loader.dataset)

    @property
    def left(self) -> int | None:
        """How many samples are left to be taken, about, if that can be told."""
        length = self.length
        if length is None:
            return None
        share = self.rank.world if self.split or _is_distributed(self.loader) else 1
        return max(0, -(-(min(length, _drawn(self.loader)) - len(self.done)) // share))

    def __iter__(self) -> Iterator[LoadedBatch]:
        """Start the loader's workers, and yield what they load."""
        if not is_loader(self.loader):
            return self._plain()
        return iter(self._stream() if is_stream(self.loader) else self._indexed())

    def _indexed(self) -> DataLoader[Any]:
        return _anew(self.loader, PlacedDataset(self.loader.dataset), batch_sampler=BatchIndices(self))

    def _stream(self) -> DataLoader[Any]:
        numbered = Numbered(self.loader.dataset, self.done, self.rank if self.split else None, self._prefix)
        return _anew(self.loader, numbered, batch_size=self.loader.batch_size)

    def _plain(self) -> Iterator[LoadedBatch]:
        """Yield the batches of any iterable; they have to be loaded before it is known whether they are done."""
        start = 0
        for number, data in enumerate(self.loader):
            size = size_of(data)
            if size is None:
                raise ExtractionFailed(
                    f"batch {number} of the loader holds no tensor: how many samples it has cannot be told; "
                    "give a DataLoader, or batches of tensors"
                )
            places = [f"{self._prefix}{place}" for place in range(start, start + size)]
            start += size
            if self.split and not self.rank.takes(number):
                continue
            rest = [row for row, place in enumerate(places) if place not in self.done]
            if rest:
                left = data if len(rest) == size else narrowed(data, rest, size)
                yield LoadedBatch([places[row] for row in rest], left, [])

    @property
    def _prefix(self) -> str:
        """What tells the numbers of ranks apart that each have a stream of their own."""
        return "" if self.split or self.rank.world == 1 else f"{self.rank.rank}/"


def is_loader(loader: Any) -> bool:
    """Whether a loader is PyTorch's and puts samples together itself, so that it can be made anew."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_sampler is not None
    )


def is_stream(loader: Any) -> bool:
    """Whether a loader's data set can only be gone through."""
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


class BatchIndices:
    """The indices of the batches to load; see Note [The loader's own order]."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self._batches: Any = source.loader.batch_sampler
        self._met = VisitedPlaces(source.length)
        self._divides = source.split and source.rank.world > 1 and not _is_distributed(source.loader)
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
        return not (self._resumes and place in self._source.done) and self._met.add(place)

    def _is_mine(self, index: Any) -> bool:
        """Whether a sample is this rank's; ranks may draw in different orders, so the index decides."""
        number = index if isinstance(index, int) else crc32(str(index).encode())
        return self._source.rank.takes(number // (getattr(self._batches, "batch_size", None) or 1))


def _without_padding(sampler: Any) -> Iterable[Any]:
    """Leave out what a `DistributedSampler` repeats so that every rank has as many samples."""
    if not isinstance(sampler, DistributedSampler):
        drawn: Iterable[Any] = sampler
        return drawn
    length = len(sampler.dataset)  # type: ignore[arg-type]
    return (index for i, index in enumerate(sampler) if sampler.rank + i * sampler.num_replicas < length)


def _draws_once(sampler: Any) -> bool:
    """Whether a sampler is one of PyTorch's that are known to give no index twice."""
    return type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    )


def _gives_own_part(sampler: Any) -> bool:
    return isinstance(sampler, DistributedSampler)


def _is_distributed(loader: Any) -> bool:
    return _gives_own_part(loader.sampler) or _gives_own_part(getattr(loader.batch_sampler, "sampler", None))


def _drawn(loader: Any) -> int:
    """Count the samples that a loader's sampler gives, all ranks together."""
    sampler = loader.batch_sampler.sampler if hasattr(loader.batch_sampler, "sampler") else loader.dataset
    count = len(sampler) if hasattr(sampler, "__len__") else len(loader.dataset)
    return count * sampler.num_replicas if _gives_own_part(sampler) else count


def _anew(loader: Any, dataset: Any, **batching: Any) -> DataLoader[Any]:
    """Make a loader like another one, with a data set around that one's."""
    workers = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
    return DataLoader(
        dataset,
        num_workers=loader.num_workers,
        collate_fn=SafeCollate(loader.collate_fn),
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        **workers,
        **batching,
    )
