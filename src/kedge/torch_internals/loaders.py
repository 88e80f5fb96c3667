"""Which samples of a data set a data loader has put into its last batch.

# Note [The samples of a batch]
A loader draws numbers of samples from its sampler, fetches the samples and hands over the batch; the
numbers are not kept. But the sampler's order is still there: those of PyTorch that shuffle draw it
whole and go through it as a list, which the list's iterator holds, and the loader counts its
batches. So the last batch is a part of that list, also where worker processes are ahead of the
program. Where a loader has no workers, and so is not ahead, the batch that its batch sampler has
just put together is a variable of that one. Nothing is known of samplers that draw one number after
another, of a sampler that has come to its end, and of data sets without numbers.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import GeneratorType
from typing import Any

from torch.utils.data import BatchSampler

from kedge.torch_internals.corners import find, lacks

_LIST: type = type(iter([]))
_RANGE: type = type(iter(range(0)))
_BATCHES = ("batch", "batch_droplast")
"""The variables of `BatchSampler.__iter__` that hold the batch."""


def last_samples(length: int) -> Sequence[int]:
    """Return the samples of the last batch that a loader has made, in the order of its rows.

    Slow: it searches all objects, without asking one for its class. See Note [The samples of a batch].

    Args:
        length: The number of rows of that batch.

    Returns:
        Their numbers in the data set; none if they are not known, or if several loaders have made
        such a batch.
    """
    if lacks("loaders"):
        return ()
    kind = find("torch.utils.data.dataloader:_BaseDataLoaderIter")
    referrers = gc.get_referrers(kind, *kind.__subclasses__())
    iterators = [each for each in referrers if issubclass(type(each), kind)]
    fitting = [found for found in map(_samples_of, iterators) if len(found) == length]
    if len(fitting) != 1:
        return ()
    return fitting[0]


def _samples_of(iterator: Any) -> list[int]:
    """Return the samples of an iterator's last batch; none if they are not known."""
    batches = getattr(iterator, "_sampler_iter", None)
    sampler = getattr(iterator, "_index_sampler", None)
    number = getattr(iterator, "_num_yielded", 0)
    workers = getattr(iterator, "_num_workers", None)
    if not getattr(iterator, "_auto_collation", False) or workers is None or not number:
        return []
    if type(sampler) is not BatchSampler or not isinstance(batches, GeneratorType):
        return []
    if batches.gi_frame is None:
        return []
    variables = batches.gi_frame.f_locals
    if workers == 0:
        own = next((variables[name] for name in _BATCHES if name in variables), ())
        return [each for each in own if isinstance(each, int)]
    drawn: Any = sampler.sampler
    order = _order_of(variables.get("sampler_iter"), len(drawn))
    if len(order) != len(drawn):  # a part of it: the sampler draws it in parts
        return []
    size = sampler.batch_size
    return [*order[(number - 1) * size : number * size]]


def _order_of(sampler: Any, count: int) -> Sequence[int]:
    """Return all numbers that an iterator goes through, also those it has passed; none if it does not tell.

    Args:
        sampler: The iterator.
        count: How many numbers they should be.
    """
    while isinstance(sampler, GeneratorType):
        sampler = sampler.gi_yieldfrom
    if type(sampler) not in (_LIST, _RANGE):
        return ()
    _, (order,), *passed = sampler.__reduce__()
    known: Sequence[int] = order
    if isinstance(order, range) and passed == [None]:
        # From Python 3.12 on, a range leaves out what it has passed.
        whole = range(order.stop - count * order.step, order.stop, order.step)
        known = whole if {*whole[:1], *whole[-1:]} == {0, count - 1} else ()
    return known
