"""Tensors of low information: masks, noise of two values, indices of a narrow range."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.offload.rebuild.indices import expand, narrow
from kedge.offload.rebuild.recipe import Term

_INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_HEAD, _PIECE = 4096, 1 << 16

Found = tuple[str, Tensor, Term]


def by_content(whole: Tensor) -> Found | None:
    """Return a shorter form of a dense tensor: the rule, the bytes, and the term that decodes them; None if there is none."""
    flat = whole.as_strided((whole.numel(),), (1,), 0)
    if whole.dtype == torch.bool:
        return "bits", pack(flat), partial(_mask, tuple(whole.size()), whole.stride())
    if whole.dtype == torch.int64:
        found = narrow(whole)
        return (
            None if found is None else ("narrow_integers", found[0], partial(_integers, found[1]))
        )
    if whole.is_floating_point() and whole.device.type == "cpu":
        return _of_two_values(whole, flat)
    return None


def pack(mask: Tensor) -> Tensor:
    """Return booleans, eight in a byte."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))
    ones = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).reshape(-1, 8)
    return (ones << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(
        1, dtype=torch.uint8
    )


def unpack(bits: Tensor, count: int) -> Tensor:
    """Return the first booleans that `pack` encoded."""
    if bits.device.type == "cpu":
        return torch.from_numpy(
            np.unpackbits(bits.numpy(), count=count, bitorder="little").view(np.bool_)
        )
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).reshape(-1)[:count].to(torch.bool)


def _mask(size: tuple[int, ...], stride: tuple[int, ...], inputs: Sequence[Tensor]) -> Tensor:
    return unpack(inputs[-1], int(np.prod(size))).as_strided(size, stride)


def _integers(how: Any, inputs: Sequence[Tensor]) -> Tensor:
    return expand(how, inputs[-1])


def _of_two_values(whole: Tensor, flat: Tensor) -> Found | None:
    """Return a tensor of two values, such as the noise of dropout, as bits; None if it has more, or 4096 equal first ones."""
    values = flat.view(torch.uint8).numpy().view(_INTEGERS[whole.element_size()])
    head = values[:_HEAD]
    others = head[head != head[0]]
    if not others.size or (others != others[0]).any():
        return None
    low, high = head[0], others[0]
    bits = _pack_two(values, low, high)
    if bits is None:
        return None
    table = np.where(
        np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
        high,
        low,
    )
    return "two_values", torch.from_numpy(bits), _TwoValues(table.astype(values.dtype), whole)


def _pack_two(values: Any, low: Any, high: Any) -> Any:
    """Return a bit for each value, 1 for the high one, in cache-sized pieces; None if there is a third value."""
    count = values.size
    bits = np.empty((count + 7) // 8, np.uint8)
    are_low, are_high = np.empty(_PIECE, np.bool_), np.empty(_PIECE, np.bool_)
    for start in range(0, count, _PIECE):
        piece = values[start : start + _PIECE]
        lows = np.equal(piece, low, out=are_low[: piece.size])
        highs = np.equal(piece, high, out=are_high[: piece.size])
        if np.count_nonzero(lows) + np.count_nonzero(highs) != piece.size:
            return None
        bits[start // 8 : (start + _PIECE) // 8] = np.packbits(highs, bitorder="little")
    return bits


class _TwoValues:
    """The term that decodes a tensor of two values from its bits."""

    __slots__ = ("_dtype", "_size", "_stride", "_table")

    def __init__(self, table: Any, whole: Tensor) -> None:
        self._table, self._dtype, self._size, self._stride = (
            table,
            whole.dtype,
            whole.size(),
            whole.stride(),
        )

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        count = self._size.numel()
        eighths, rest = divmod(count, 8)
        made = np.empty(count, self._table.dtype)
        bits = inputs[-1].numpy()
        np.take(
            self._table,
            bits[:eighths],
            axis=0,
            out=made[: count - rest].reshape(-1, 8),
            mode="clip",
        )
        if rest:
            made[count - rest :] = self._table[bits[eighths]][:rest]
        return torch.from_numpy(made).view(self._dtype).as_strided(self._size, self._stride)
