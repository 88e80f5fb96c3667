"""Kernels without a public name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kedge.torch_internals.corners import late

_EACH = "torch:_foreach_"


def _norm_of_each(tensors: Sequence[Tensor], *, dtype: torch.dtype) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]


def _difference_of_each(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    return [tensor - other for tensor, other in zip(tensors, others, strict=True)]


def _assert_here(value: Tensor, message: str) -> None:
    if not bool(value):
        raise RuntimeError(message)


norms: Callable[..., Sequence[Tensor]] = late(f"{_EACH}norm", _norm_of_each)
"""The norms of many tensors of one device."""

differences: Callable[..., Sequence[Tensor]] = late(f"{_EACH}sub", _difference_of_each)
"""What is left of many tensors when others are taken off."""

negated_alias: Callable[[Tensor], Tensor] = late("torch:_neg_view", torch.neg)
assert_on_device: Callable[[Tensor, str], None] = late("torch:_assert_async", _assert_here)
"""Raises where a device finds that something is not so, if possible without waiting for it."""

keeping_versions: Callable[[Any], AbstractContextManager[Any]] = late(
    "torch.autograd:_unsafe_preserve_version_counter", lambda _: nullcontext()
)
"""What is written to tensors in here counts as no change."""
