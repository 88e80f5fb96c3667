"""The reductions behind `measure`, each chosen to read memory as few times as PyTorch allows.

# Note [Which reductions]
On a CPU ``sum``, ``dot``, ``amin`` and ``amax`` run at memory speed, while ``var``, ``norm`` with
p=0, ``count_nonzero`` and ``isfinite`` are 10 to 60 times slower. So squares are summed by ``dot``,
and elements unlike zero are counted by comparing into a small float scratch and summing that. A
NaN or infinity makes the sum non-finite; only then are such elements counted. On a GPU every
reduction runs at memory speed, and asking whether to count would wait for it, so all are run.

What fits into a processor's first memory is reduced by numpy: there it is the call that takes the time, and
numpy's take a third of PyTorch's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.store.exponents import spacing
from kedge.torch_internals import modes

if TYPE_CHECKING:
    from kedge.actions.table import Slot

_CHUNK = 1 << 18
SMALL = 1 << 14
DRAWN = 256
"""How many elements of a value are drawn for its histogram of magnitudes: a share of 5 % is known to within 1.4 %."""
_HALF = frozenset({torch.float16, torch.bfloat16})
_COUNTED = _HALF | {torch.float32, torch.float64}
_NARROW = frozenset(dtype for name, dtype in vars(torch).items() if name.startswith("float8_"))


class _Scratch(threading.local):
    """One thread's memory to compare into."""

    def __init__(self) -> None:
        self.chunks: dict[torch.dtype, Tensor] = {}


_scratch = _Scratch()


def measurable(value: Tensor) -> bool:
    """Tell whether a tensor holds numbers that can be summed up where it is."""
    dtype = value.dtype
    numbers = dtype in _COUNTED or dtype.is_complex or dtype in _NARROW
    there = value.layout is torch.strided and not value.is_meta and not value.is_nested
    return numbers and there and not modes.is_fake(value) and value.numel() > 0


def transforms(value: Tensor) -> bool:
    """Tell whether a transform of `torch.func` or a trace is under way, or a mode in which tensors hold nothing."""
    return modes.is_transforming() or modes.is_fake(value) or modes.is_captured()


@contextmanager
def plainly() -> Iterator[None]:
    """Suspend what is under way, so that measuring is no part of it.

    Transforms refuse to write to what they did not make, fake tensors hold nothing, and a traced graph would hold our
    operations, and write to our tables whenever it runs.
    """
    with modes.without_transforms(), modes.plainly():
        yield


def real(value: Tensor) -> Tensor:
    """Return a value as real numbers that PyTorch adds up."""
    if value.is_complex():
        return torch.view_as_real(value.resolve_conj())
    return value.float() if value.dtype in _NARROW else value


def flat(value: Tensor) -> Tensor:
    """Return a detached one-dimensional tensor of all real numbers in it; their order does not matter.

    Layouts that fill their memory without gaps are not copied.
    """
    value = real(value.detach())
    if value.dim() == 4 and not value.is_contiguous():
        value = value.permute(0, 2, 3, 1)
    if value.dim() >= 2 and not value.is_contiguous():
        value = value.mT
    return value.reshape(-1)


def small(x: Tensor) -> NDArray[Any] | None:
    """Return a flat tensor as numpy's, where that makes reducing it cheaper."""
    fits = x.numel() <= SMALL and x.dtype is torch.float32 and x.device.type == "cpu"
    return x.numpy() if fits and type(x) is Tensor else None


def norm(x: Tensor, slot: Slot) -> None:
    """Write the sum of squares, and how many elements are not finite if it is not.

    On a GPU, where looking at it would wait, the sum is written as well: it is finite if every element is,
    and squares can be too large where elements are not.
    """
    own = small(x)
    if own is not None and slot.host is not None:
        with np.errstate(all="ignore"):
            slot.host[1] = own.dot(own)
        if own.size == 1:  # such as a loss
            slot.host[0] = own[0]
    else:
        _write_norm(x, slot)
    if slot.host is None:
        finite(x, slot)
    elif not math.isfinite(slot.host[1]):
        slot.host[5] = _not_finite(x)


def finite(x: Tensor, slot: Slot) -> None:
    """Write the sum: it is finite if every element is."""
    if x.dtype is torch.float32:
        torch.sum(x, 0, out=slot.sum)
    else:
        slot.sum.copy_(_total(x))


def _write_norm(x: Tensor, slot: Slot) -> None:
    large = x.numel() > _CHUNK or x.dtype in _HALF
    if large and x.device.type == "cpu":
        slot.sumsq.copy_(_squares_on_cpu(x))
    elif x.dtype is torch.float32:
        torch.dot(x, x, out=slot.sumsq)
    else:
        slot.sumsq.copy_(_squares(x))


def full(x: Tensor, slot: Slot) -> None:
    """Write every statistic; see Note [Which reductions]."""
    own = small(x)
    if own is not None and slot.host is not None:
        _full_small(own, slot.host)
        return
    finite(x, slot)
    _write_norm(x, slot)
    if x.dtype is torch.float32:
        torch.amin(x, 0, out=slot.min)
        torch.amax(x, 0, out=slot.max)
    else:
        slot.min.copy_(x.amin())
        slot.max.copy_(x.amax())
    if x.device.type == "cpu":
        _count_on_cpu(x, slot)
    else:
        slot.nonzero.copy_(torch.count_nonzero(x))
        slot.nonfinite.copy_(x.numel() - torch.isfinite(x).sum())


def _full_small(x: NDArray[Any], host: NDArray[Any]) -> None:
    with np.errstate(all="ignore"):
        total = x.sum()
        host[:5] = total, x.dot(x), x.min(), x.max(), np.count_nonzero(x)
    host[5] = 0 if math.isfinite(total) else x.size - np.count_nonzero(np.isfinite(x))


def drawn(x: Tensor) -> Tensor:
    """Return up to 256 elements of a flat tensor, evenly spread."""
    return x[:: spacing(x.numel(), DRAWN)]


def _not_finite(x: Tensor) -> int:
    return x.numel() - int(torch.isfinite(x).sum())


def channels(value: Tensor, dim: int, out: Tensor) -> None:
    """Write the largest value of each channel."""
    others = [d for d in range(value.dim()) if d != dim % value.dim()]
    value = value.detach()
    out.copy_(torch.amax(value, dim=others) if others else value)


def _count_on_cpu(x: Tensor, slot: Slot) -> None:
    scratch = _scratch.chunks.get(x.dtype)
    if scratch is None:
        with torch.inference_mode(mode=False):
            scratch = _scratch.chunks[x.dtype] = torch.empty(_CHUNK, dtype=x.dtype, device=x.device)
    total: float | Tensor = 0.0
    bad = 0
    spoiled = slot.host is not None and not math.isfinite(slot.host[0])
    for chunk in x.split(_CHUNK):
        part = scratch[: chunk.numel()]
        torch.ne(chunk, 0, out=part)
        total = total + torch.sum(part, 0, dtype=torch.float32)
        if spoiled:
            bad += _not_finite(chunk)
    slot.nonzero.copy_(total) if isinstance(total, Tensor) else slot.nonzero.fill_(total)
    slot.nonfinite.fill_(bad)


def _total(x: Tensor) -> Tensor:
    return x.sum(dtype=torch.float32) if x.dtype in _HALF else x.sum()


def _squares_on_cpu(x: Tensor) -> Tensor:
    """Sum squares up piece by piece: in float32, one sum of many millions would be wrong by percents."""
    pieces = (piece.float() if x.dtype in _HALF else piece for piece in x.split(_CHUNK))
    return torch.stack([torch.dot(piece, piece) for piece in pieces]).sum()


def _squares(x: Tensor) -> Tensor:
    if x.dtype in _HALF:
        norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float32)
        return norm.square()
    return torch.dot(x, x)
