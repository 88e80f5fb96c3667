"""Kernels without a public name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kedge.torch_internals import accelerators
from kedge.torch_internals.corners import late


def _norm_of_each(tensors: Sequence[Tensor], order: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def _assert_here(value: Tensor, message: str) -> None:
    if not bool(value):
        raise RuntimeError(message)


_norms: Callable[[Sequence[Tensor], int, torch.dtype], Sequence[Tensor]] = late(
    "torch:_foreach_norm", _norm_of_each
)

negated_alias: Callable[[Tensor], Tensor] = late("torch:_neg_view", torch.neg)
_assert_async: Callable[[Tensor, str], None] = late("torch:_assert_async", _assert_here)
keeping_versions: Callable[[Any], AbstractContextManager[Any]] = late(
    "torch.autograd:_unsafe_preserve_version_counter", lambda _: nullcontext()
)
"""A block in which writing to tensors does not count as a change."""


def norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the norms of many tensors, in any order, by one call if possible.

    Those of float64 are in float64, all others in float32.
    """
    wide = [tensor for tensor in tensors if tensor.dtype is torch.float64]
    if not wide:
        return _norms(tensors, 2, torch.float32)
    found = list(_norms(wide, 2, torch.float64))
    others = [tensor for tensor in tensors if tensor.dtype is not torch.float64]
    if others:
        found += _norms(others, 2, torch.float32)
    return found


def wide_norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the norms of tensors of one device, by one call if possible.

    They are in float64, in which no squares of finite numbers of another dtype overflow, where the
    device has it.
    """
    dtype = torch.float64
    if not accelerators.has_doubles(tensors[0].device):
        dtype = torch.float32
    return _norms(tensors, 2, dtype)


def assert_on_device(value: Tensor, message: str) -> None:
    """Raise if a value on a device is false, without waiting for the device if it has assertions."""
    try:
        _assert_async(value, message)
    except NotImplementedError:
        _assert_here(value, message)
