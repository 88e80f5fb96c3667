"""Which samples of a data set a loader has put into its last batch."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from kedge.torch_internals.loaders import last_samples

DATA = TensorDataset(torch.arange(100))
ORDERS: dict[str, Any] = {
    "in order": {},
    "backwards": {"sampler": range(99, -1, -1)},
    "shuffled": {"shuffle": True},
    "without the last part": {"shuffle": True, "drop_last": True},
    "weighted": {"sampler": WeightedRandomSampler(torch.ones(100), 64)},
    "of one rank": {"sampler": DistributedSampler(DATA, num_replicas=2, rank=1)},
    "one after another": {"sampler": SubsetRandomSampler(range(50))},
    "drawn in parts": {"sampler": RandomSampler(DATA, replacement=True, num_samples=100)},
}


def told(loader: Any, most: int = 100) -> list[bool]:
    """Return, for each of the first batches, whether its samples are known; those that are have to be right."""
    known = []
    for (batch,), _ in zip(loader, range(most), strict=False):
        samples = last_samples(len(batch))
        assert not samples or list(samples) == batch.tolist()
        known.append(bool(samples))
    del batch
    for thread in threading.enumerate():  # a loader that has ended does not wait for its own
        if thread.name == "QueueFeederThread":
            thread.join()
    return known


@pytest.mark.parametrize("order", ORDERS)
def test_the_samples_of_every_batch_are_known_without_workers(order: str) -> None:
    """Also those of a last batch that is smaller."""
    known = told(DataLoader(DATA, batch_size=16, **ORDERS[order]))

    assert len(known) > 3
    assert all(known)


@pytest.mark.parametrize(
    ("order", "is_known"),
    [(name, name not in ("one after another", "drawn in parts")) for name in ORDERS],
)
def test_with_workers_they_are_those_of_an_order_that_was_drawn_whole(
    order: str, is_known: bool
) -> None:
    """The sampler is ahead of the program, so its own last batch is a later one."""
    loader = DataLoader(DATA, batch_size=4, num_workers=1, **ORDERS[order])

    assert set(told(loader, most=3)) == {is_known}


def test_of_two_loaders_neither_is_taken_for_the_other() -> None:
    """If both have made a batch of this size, it is not known whose it is."""
    one, other = iter(DataLoader(DATA, batch_size=8)), iter(DataLoader(DATA, batch_size=8))
    next(one)
    assert list(last_samples(8)) == list(range(8))

    next(other)

    assert not last_samples(8)
    assert not last_samples(7)


def test_a_data_set_without_numbers_has_no_samples() -> None:
    """Nor has a loader that fetches whole batches."""

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(torch.arange(32))

    for loader in (DataLoader(Stream(), batch_size=8), DataLoader(DATA, batch_size=None)):
        under_way = iter(loader)
        next(under_way)
        assert not last_samples(8)
