"""Aliases of the memory behind a tensor, which share its version counter and have no graph."""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.torch_internals.kernels import negated_alias


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


def run(value: Tensor) -> Tensor:
    """Return the elements of a tensor's storage from its first to its last, as an alias."""
    value = plain(value)
    reach = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((1 + reach,), (1,))


def flat(value: Tensor) -> Tensor:
    """Return all elements of a tensor's storage, in the order of memory, as an alias."""
    return words(value).view(value.dtype)
