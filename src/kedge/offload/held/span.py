"""How much of its storage a tensor is, and so what is taken of it.

# Note [Alone]
Of a storage of which the saved tensor spans less than half, only the tensor is taken. So it is if it spans more
but is a comb, with less than a fifth of the storage's elements. Otherwise the whole storage is taken, once, for
all that share it: three interleaved parts of one projection go as one, with their strides.
"""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

Key: TypeAlias = int | tuple[object, ...]
"""What makes an entry one: the number of its storage, or this and where in it the tensor lies that is alone."""


def is_alone(value: Tensor) -> bool:
    """Tell whether a tensor is taken without the rest of its storage; see Note [Alone]."""
    whole, own = value.untyped_storage().nbytes(), value.nbytes
    if own >= whole:
        return False
    span = (1 + sum((size - 1) * step for step, size in _reach(value))) * value.itemsize
    return 2 * span < whole or 5 * own < whole


def own_key(value: Tensor, number: int) -> Key:
    """Return what makes the entry of a tensor's own elements one, in whatever order it has its dimensions."""
    return number, value.storage_offset(), value.itemsize, tuple(sorted(_reach(value)))


def _reach(value: Tensor) -> list[tuple[int, int]]:
    return [(step, size) for step, size in zip(value.stride(), value.shape, strict=True) if size != 1]
