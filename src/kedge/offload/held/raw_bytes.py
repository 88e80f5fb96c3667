"""The bytes of a saved tensor: the part of its storage that is taken, as an alias, and its digest.

# Note [Alone]
If the saved tensor spans less than half of its storage, only the tensor is taken; so too if it
spans more but leaves gaps and has less than a fifth of the storage's elements. Otherwise the whole
storage is taken, once, for all tensors that share it: three interleaved parts of one projection are
moved together, with their strides.

# Note [Digest]
Sums of 512 words of 64 bits each, which wrap around, and the bytes behind the last full block as
they are. A digest reads the memory once, at the speed of reading; it detects every change of a
single element, and a change of several unless their differences cancel out in each of the sums.

# Note [Without waiting]
A device with assertions, such as CUDA's, compares the sums, and the host does not wait for the
answer: if they differ, the device stops with an assertion, which ends the program at its next use.
That is harsh, but a wrong gradient would otherwise go unnoticed.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kedge.offload.codecs.layout import ElementLayout, flatten
from kedge.torch_internals.accelerators import can
from kedge.torch_internals.kernels import assert_on_device, negated_alias
from kedge.torch_internals.modes import plainly

_WORDS = 512
_BLOCK = 8 * _WORDS

_CHANGED = (
    "kedge.offload: rebuilt bytes differ from the saved ones: "
    "the program changed a tensor without autograd noticing"
)

Digest = tuple[Tensor, Tensor]
EntryKey: TypeAlias = int | tuple[object, ...]
"""The key of an entry: the number of its storage.

That of an entry with one tensor only also has the tensor's place in the storage.
"""


class TakenBytes(NamedTuple):
    """The bytes of a storage, or of one tensor of it.

    Attributes:
        data: The bytes, contiguous: an alias, or a copy if the elements of one tensor are not
            contiguous.
        layout: The layout of a tensor that is taken alone; None if the bytes have their original
            order and gaps.
        digest: Their digest; None if they are not compared, or cannot be: see `is_comparable`.
    """

    data: Tensor
    layout: ElementLayout | None
    digest: Digest | None


def is_comparable(device: torch.device) -> bool:
    """Whether bytes on a device can be compared by digests; on other devices nothing is rebuilt.

    Of devices other than CUDA's it is tried once whether they add up words of 64 bits as the CPU
    does.
    """
    return device.type in ("cpu", "cuda") or can(_adds_words, device)


def take(value: Tensor, *, alone: bool, compared: bool = True) -> TakenBytes:
    """Return the bytes of a tensor's storage, or those of the tensor alone.

    Args:
        value: The tensor.
        alone: Whether it is taken without the rest of its storage.
        compared: Whether to take the digest, too.
    """
    data, layout = _bytes_of(value, alone=alone)
    found = None
    if compared and is_comparable(value.device):
        found = _sums(data)
    return TakenBytes(data, layout, found)


def digest(value: Tensor, *, alone: bool) -> Digest | None:
    """Return the digest of a tensor's storage, or of the tensor alone.

    Returns:
        None on devices that cannot be compared.
    """
    if not is_comparable(value.device):
        return None
    data, _ = _bytes_of(value, alone=alone)
    return _sums(data)


def same(one: Digest, other: Digest) -> bool:
    """Whether two digests are equal.

    True on a device, which asserts it: see Note [Without waiting].
    """
    if one[0].device.type != "cpu":
        demand(one, other)
        return True
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def demand(one: Digest, other: Digest) -> None:
    """Queue an assertion on the device that two digests are equal."""
    alike = torch.logical_and((one[0] == other[0]).all(), (one[1] == other[1]).all())
    assert_on_device(alike, _CHANGED)


def is_alone(value: Tensor) -> bool:
    """Whether a tensor is taken without the rest of its storage; see Note [Alone]."""
    whole = value.untyped_storage().nbytes()
    own = value.nbytes
    if own >= whole:
        return False
    span = _span(value) * value.itemsize
    return 2 * span < whole or 5 * own < whole


def taken_bytes(value: Tensor) -> int:
    """Return the number of bytes taken for a tensor: those of its storage, or its own."""
    if is_alone(value):
        return value.nbytes
    return value.untyped_storage().nbytes()


def own_key(value: Tensor, number: int) -> EntryKey:
    """Return the key of the entry of a tensor's own elements.

    It is independent of the order of the tensor's dimensions.
    """
    return number, value.storage_offset(), value.itemsize, tuple(sorted(_reach(value)))


def plain(value: Tensor) -> Tensor:
    """Return an alias of the values as they are in memory.

    It has no graph, and neither the conjugate nor the negative bit.
    """
    value = value.detach()
    if value.is_conj():
        value = value.conj()
    if value.is_neg():
        value = negated_alias(value)
    return value


def words(value: Tensor) -> Tensor:
    """Return all bytes of a tensor's storage as an alias that shares its version counter."""
    value = plain(value)
    storage = value.untyped_storage()
    size = storage.nbytes()
    if size % value.itemsize:
        data = torch.empty(0, dtype=torch.uint8, device=value.device)
        return data.set_(storage, 0, (size,), (1,))
    return value.as_strided((size // value.itemsize,), (1,), 0).view(torch.uint8)


def flat(value: Tensor) -> Tensor:
    """Return all elements of a tensor's storage, in the order of memory, as an alias."""
    return words(value).view(value.dtype)


def _adds_words(device: torch.device) -> bool:
    with plainly():
        numbers = torch.arange(3 * _BLOCK + 5, dtype=torch.int64).mul_(-0x61C8864680B583EB)
        data = numbers.view(torch.uint8)[:-3]
        head, tail = _sums(data)
        head_there, tail_there = _sums(data.to(device))
        return torch.equal(head, head_there.cpu()) and torch.equal(tail, tail_there.cpu())


def _bytes_of(value: Tensor, *, alone: bool) -> tuple[Tensor, ElementLayout | None]:
    """Return the bytes of a tensor's storage, or those of the tensor alone, contiguous.

    If the elements of a tensor alone overlap, all bytes between them are among these.
    """
    if not alone:
        return words(value), None
    value = plain(value)
    found = flatten(value)
    if found is None:
        return value.as_strided((_span(value),), (1,)).view(torch.uint8), None
    elements, layout = found
    return elements.contiguous().view(torch.uint8), layout


def _span(value: Tensor) -> int:
    """Return the number of elements from a tensor's first one in memory to its last."""
    return 1 + sum((size - 1) * step for step, size in _reach(value))


def _reach(value: Tensor) -> list[tuple[int, int]]:
    steps = zip(value.stride(), value.shape, strict=True)
    return [(step, size) for step, size in steps if size != 1]


def _sums(data: Tensor) -> Digest:
    blocks = data.numel() // _BLOCK
    head = data[: blocks * _BLOCK]
    tail = data[blocks * _BLOCK :]
    if head.storage_offset() % 8:
        head = head.clone()
    return head.view(torch.int64).view(blocks, _WORDS).sum(1), tail.clone()
