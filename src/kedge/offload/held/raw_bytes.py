"""The bytes of a saved tensor: how much of its storage is taken, as an alias of it, and what they come to.

# Note [Alone]
Of a storage of which the saved tensor spans less than half, only the tensor is taken. So it is if it spans more
but is a comb, with less than a fifth of the storage's elements. Otherwise the whole storage is taken, once, for
all that share it: three interleaved parts of one projection go as one, with their strides.

# Note [Digest]
Sums of 512 words each, which wrap around, and the bytes behind the last of them as they are. To sum is to read memory
once, at the speed of reading; every change of a single element is found, and one of several unless their
differences cancel out in each of the sums.

# Note [Without waiting]
On a CUDA device the sums are compared there, and the host does not wait for the answer: if it is no, the device stops with
an assertion, which ends the program at its next use. That is harsh, but a wrong gradient would not be noticed at all.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kedge.offload.codecs.layout import ElementLayout, flatten
from kedge.torch_internals.kernels import assert_on_device, negated_alias

_WORDS = 512
_BLOCK = 8 * _WORDS

KNOWN = frozenset({"cpu", "cuda"})
"""The devices on which what was rebuilt can be compared; on others nothing is rebuilt."""
_CHANGED = "kedge.offload: saved bytes are not what they were: something was changed where autograd does not see it"

Digest = tuple[Tensor, Tensor]
EntryKey: TypeAlias = int | tuple[object, ...]
"""What an entry is found by: the number of its storage, or this and where in it the tensor lies that is alone."""


class TakenBytes(NamedTuple):
    """The bytes of a storage, or of one tensor of it.

    Attributes:
        data: The bytes in a row: an alias, or a copy where the elements of one tensor do not lie in a row.
        layout: Where the elements of a tensor that is alone lay; None if the bytes are as they lay.
        digest: What they come to; None on devices where it is not known how.
    """

    data: Tensor
    layout: ElementLayout | None
    digest: Digest | None


def take(value: Tensor, *, alone: bool) -> TakenBytes:
    """Return the bytes of a tensor's storage, or those of the tensor alone."""
    data, layout = _row(value) if alone else (words(value), None)
    return TakenBytes(data, layout, _sums(data) if value.device.type in KNOWN else None)


def digest(value: Tensor, *, alone: bool) -> Digest | None:
    """Return what the bytes of a tensor's storage, or of the tensor alone, come to; None where it is not known how."""
    if value.device.type not in KNOWN:
        return None
    return _sums(_row(value)[0] if alone else words(value))


def same(one: Digest, other: Digest) -> bool:
    """Whether two are of the same bytes; on a device that is assumed, and the device makes sure: see Note [Without waiting]."""
    if one[0].device.type != "cpu":
        demand(one, other)
        return True
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def demand(one: Digest, other: Digest) -> None:
    """Have the device make sure that two are of the same bytes."""
    alike = torch.logical_and((one[0] == other[0]).all(), (one[1] == other[1]).all())
    assert_on_device(alike, _CHANGED)


def is_alone(value: Tensor) -> bool:
    """Whether a tensor is taken without the rest of its storage; see Note [Alone]."""
    whole, own = value.untyped_storage().nbytes(), value.nbytes
    if own >= whole:
        return False
    span = (1 + sum((size - 1) * step for step, size in _reach(value))) * value.itemsize
    return 2 * span < whole or 5 * own < whole


def taken_bytes(value: Tensor) -> int:
    """Return how many bytes are taken of a tensor: those of its storage, or its own."""
    return value.nbytes if is_alone(value) else value.untyped_storage().nbytes()


def own_key(value: Tensor, number: int) -> EntryKey:
    """Return the key of the entry of a tensor's own elements, in whatever order it has its dimensions."""
    return number, value.storage_offset(), value.itemsize, tuple(sorted(_reach(value)))


def plain(value: Tensor) -> Tensor:
    """Return an alias without a graph, and without the bits that say "conjugate" or "negative" of what is in memory."""
    value = value.detach()
    if value.is_conj():
        value = value.conj()
    return negated_alias(value) if value.is_neg() else value


def words(value: Tensor) -> Tensor:
    """Return all bytes of a tensor's storage as an alias that shares its version counter."""
    value = plain(value)
    size = value.untyped_storage().nbytes()
    if size % value.itemsize:
        return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage(), 0, (size,), (1,))
    return value.as_strided((size // value.itemsize,), (1,), 0).view(torch.uint8)


def flat(value: Tensor) -> Tensor:
    """Return all elements of a tensor's storage, in the order of memory, as an alias."""
    return words(value).view(value.dtype)


def _row(value: Tensor) -> tuple[Tensor, ElementLayout | None]:
    """Return a tensor's own bytes in a row; if its elements overlap, with all that lies between them."""
    value = plain(value)
    found = flatten(value)
    if found is not None:
        return found[0].contiguous().view(torch.uint8), found[1]
    span = 1 + sum((size - 1) * step for step, size in _reach(value))
    return value.as_strided((span,), (1,)).view(torch.uint8), None


def _reach(value: Tensor) -> list[tuple[int, int]]:
    return [(step, size) for step, size in zip(value.stride(), value.shape, strict=True) if size != 1]


def _sums(data: Tensor) -> Digest:
    blocks = data.numel() // _BLOCK
    head, tail = data[: blocks * _BLOCK], data[blocks * _BLOCK :]
    if head.storage_offset() % 8:
        head = head.clone()
    return head.view(torch.int64).view(blocks, _WORDS).sum(1), tail.clone()
