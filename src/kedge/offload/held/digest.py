"""What bytes come to: enough to find, later, that they are others.

# Note [Digest]
Sums of 512 words each, which wrap around, and the bytes behind the last of them as they are. To sum is to read memory
once, at the speed of reading; every change of a single element is found, and one of several unless their
differences cancel out in each of the sums.

# Note [Without waiting]
On a CUDA device the sums are compared there, and nobody waits for the answer: if it is no, the device stops with an
assertion, which ends the program at its next use. That is harsh, but a wrong gradient would not be noticed at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.offload.codecs.layout import flatten
from kedge.offload.held.raw_bytes import plain, run, words
from kedge.torch_internals.kernels import assert_on_device

_WORDS = 512
_BLOCK = 8 * _WORDS

KNOWN = frozenset({"cpu", "cuda"})
"""The devices on which what was rebuilt can be compared; on others nothing is rebuilt."""
_CHANGED = "kedge.offload: saved bytes are not what they were: something was changed where autograd does not see it"

Digest = tuple[Tensor, Tensor]


def digest(value: Tensor, *, alone: bool) -> Digest | None:
    """Sum up the bytes of a tensor's storage, or those of the tensor alone; None on devices where it is not known how."""
    if value.device.type not in KNOWN:
        return None
    if not alone:
        return _sums(words(value))
    found = flatten(plain(value))
    own = run(value) if found is None else found[0].contiguous()
    return _sums(own.view(torch.uint8))


def same(one: Digest, other: Digest) -> bool:
    """Tell whether two are of the same bytes; on a device it is assumed, and made sure of there: see Note [Without waiting]."""
    if one[0].device.type != "cpu":
        demand(one, other)
        return True
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def demand(one: Digest, other: Digest) -> None:
    """Have the device make sure that two are of the same bytes."""
    alike = torch.logical_and((one[0] == other[0]).all(), (one[1] == other[1]).all())
    assert_on_device(alike, _CHANGED)


def _sums(flat: Tensor) -> Digest:
    blocks = flat.numel() // _BLOCK
    head, tail = flat[: blocks * _BLOCK], flat[blocks * _BLOCK :]
    if head.storage_offset() % 8:
        head = head.clone()
    return head.view(torch.int64).view(blocks, _WORDS).sum(1), tail.clone()
