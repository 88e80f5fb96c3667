"""The same statistics by PyTorch's reductions, without the compiled part or for values that it cannot read.

# Note [Which reductions]
On a CPU ``sum``, ``dot``, ``amin`` and ``amax`` run at memory speed, while ``var``, ``norm`` with
p=0, ``count_nonzero`` and ``isfinite`` are 10 to 60 times slower. So squares are summed by ``dot``,
and non-zero elements are counted by comparing into a small float buffer and summing that. A NaN or
infinity makes the sum non-finite; only then are such elements counted.

NumPy reduces values that fit into a processor's first-level cache: call overhead dominates their
time, and that of NumPy is a third of PyTorch's.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.torch_internals.tensors import is_only_zeros

_CHUNK = 1 << 18
SMALL = 1 << 14
DRAWN = 256
"""The number of elements sampled from a value for its histogram of magnitudes: a share of 5 % is known to within 1.4 %."""
_LEAST = 2.0**-90
"""A smaller sum of squares may lack squares that are subnormal in float32."""
_HALF = frozenset({torch.float16, torch.bfloat16})
_NARROW = frozenset(dtype for name, dtype in vars(torch).items() if name.startswith("float8_"))

Row = tuple[float, float, float, float, float, float, float, float]


class _Scratch(threading.local):
    """One thread's buffers for comparisons."""

    def __init__(self) -> None:
        self.chunks: dict[torch.dtype, Tensor] = {}


_scratch = _Scratch()


def row(value: Tensor, what: str = "full") -> Row:
    """Return the statistics of a value in this process's memory, as a row of a table."""
    return of_flat(flat(value), what)


def of_flat(x: Tensor, what: str = "full") -> Row:
    """Return the statistics of a flat real tensor in this process's memory, as a row of a table."""
    nan, count = math.nan, float(x.numel())
    if what == "finite":
        return total(x), nan, nan, nan, nan, nan, nan, count
    squares = _squares(x)
    if what == "norm":
        sum_ = float(x) if count == 1 else nan  # such as a loss: its norm alone would lose the sign
        return sum_, squares, nan, nan, nan, *_not_finite(x, squares), count
    own = small(x)
    if own is not None:
        with np.errstate(all="ignore"):
            sum_ = float(own.sum(dtype=np.float64))
            low, high, nonzero = float(own.min()), float(own.max()), float(np.count_nonzero(own))
    else:
        sum_, low, high, nonzero = total(x), float(x.amin()), float(x.amax()), _count_nonzero(x)
    return sum_, squares, low, high, nonzero, *_not_finite(x, sum_), count


def real(value: Tensor) -> Tensor:
    """Return a value as real numbers that PyTorch can sum."""
    if value.is_complex():
        return torch.view_as_real(value.resolve_conj())
    return value.float() if value.dtype in _NARROW else value.resolve_neg()


def flat(value: Tensor) -> Tensor:
    """Return a detached one-dimensional tensor of all real numbers in a value, in any order.

    Gapless layouts (transposed, channels last, any other order of dimensions) are not copied.
    """
    value = real(value.detach())
    if is_only_zeros(value):  # zeros without memory, as a forward-mode tangent of nothing
        value = value.clone()
    if not value.is_contiguous():
        value = value.permute(sorted(range(value.dim()), key=value.stride, reverse=True))
    return value.reshape(-1)


def small(x: Tensor) -> NDArray[Any] | None:
    """Return a flat tensor as a numpy array if that makes its reduction cheaper; else None."""
    fits = x.numel() <= SMALL and x.dtype is torch.float32 and x.device.type == "cpu"
    return x.numpy() if fits and type(x) is Tensor else None


def total(x: Tensor) -> float:
    """Return the sum of a flat tensor; in float64 if float32 overflows."""
    sum_ = float(x.sum(dtype=torch.float32) if x.dtype in _HALF else x.sum())
    if math.isfinite(sum_) or x.dtype is torch.float64:
        return sum_
    return sum(float(piece.sum(dtype=torch.float64)) for piece in x.split(_CHUNK))


def _not_finite(x: Tensor, total: float) -> tuple[int, int]:
    """Return the counts of non-finite numbers and of NaN, given a total that shows whether there are any."""
    if math.isfinite(total):
        return 0, 0
    return x.numel() - int(torch.isfinite(x).sum()), int(torch.isnan(x).sum())


def _squares(x: Tensor) -> float:
    """Return the sum of squares, added up piece by piece: one float32 sum of many millions would be off by percents."""
    return sum(map(_squares_of_piece, x.split(_CHUNK)))


def _squares_of_piece(piece: Tensor) -> float:
    """Return the sum of squares of a piece; in float64 if they overflow or vanish in float32."""
    own = small(piece)
    if own is not None:
        with np.errstate(all="ignore"):
            squares = float(own.dot(own))
    else:
        wide = piece.float() if piece.dtype in _HALF else piece
        squares = float(torch.dot(wide, wide))
    if piece.dtype is torch.float64 or _LEAST < squares < math.inf:
        return squares
    wide = piece.double()
    return float(torch.dot(wide, wide))


def _count_nonzero(x: Tensor) -> float:
    scratch = _scratch.chunks.get(x.dtype)
    if scratch is None:
        with torch.inference_mode(mode=False):
            scratch = _scratch.chunks[x.dtype] = torch.empty(_CHUNK, dtype=x.dtype, device=x.device)
    nonzero = 0.0
    for chunk in x.split(_CHUNK):
        part = scratch[: chunk.numel()]
        torch.ne(chunk, 0, out=part)
        nonzero += float(torch.sum(part, 0, dtype=torch.float32))
    return nonzero
