"""The 8-bit codecs: eight bits an element, and a scale for every 256 of them.

# Note [Non-finite blocks]
A block's scale is positive. If a block holds a NaN or an infinity, it has no peak: its finite
elements use one code fewer, the freed codes stand for the non-finite values, and a negative scale
marks the block. The decision needs no value read from the device, so nothing waits; on a CPU, where
reading waits for nothing, the encoder skips all of this if every block is finite.

# Note [The scale's last bit]
A scale is rounded down by one unit in its last place, so that the largest code times the scale
never exceeds the block's peak: otherwise the largest number of a dtype would come back as an
infinity. It is at least the smallest normal number, so that division by it stays finite; a block
with a smaller peak still comes back within half that number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kedge.offload.codecs.layout import flatten, restore

BLOCK = 256
_AT_ONCE = 1 << 10
"""Blocks encoded at once on a CPU: as many as fit into its caches."""
_AT_ONCE_FARTHER = 1 << 16
"""Blocks encoded at once on a device: as many as fill it; this bounds the memory that it takes."""


class Blockwise:
    """The base of both codecs.

    It cuts into blocks, scales, and puts scales and codes into one row of bytes.

    Attributes:
        code: The dtype of a code.
        top: The largest code.
        top_beside: The largest code of a finite element in a block that holds non-finite values.
    """

    name: str
    exact: bool = False
    code: torch.dtype
    top: float
    top_beside: float

    def encode(self, value: Tensor) -> tuple[Tensor, Any] | None:
        """Return scales and codes.

        Returns:
            None unless the tensor has at least a block of floats of at least 16 bits.
        """
        if not value.is_floating_point() or value.element_size() < 2 or value.numel() < BLOCK:
            return None
        found = flatten(value.detach())
        if found is None:
            return None

        flat, layout = found
        work = torch.float64 if flat.dtype is torch.float64 else torch.float32
        count = _blocks_of(len(flat))
        size = count * work.itemsize + len(flat)
        kept = torch.empty(size, dtype=torch.uint8, device=flat.device)
        scales, codes = _parts(kept, count, work, self.code)

        for first, last, row in _pieces(len(flat), flat.device.type):
            blocks = flat[first:last].to(work).view(-1, row)
            self._scale(blocks, scales[first // BLOCK : _blocks_of(last)], codes[first:last])
        return kept, (layout, work)

    def decode(self, kept: Tensor, extra: Any) -> Tensor:
        """Return the codes multiplied by their scales, in the layout of the encoded tensor."""
        layout, work = extra
        size = math.prod(layout.stored)
        scales, codes = _parts(kept, _blocks_of(size), work, self.code)
        flat = torch.empty(size, dtype=layout.dtype, device=kept.device)

        for first, last, row in _pieces(size, kept.device.type):
            values = self._widen(codes[first:last].view(-1, row), work)
            values = self._unscale(values, scales[first // BLOCK : _blocks_of(last)])
            flat[first:last].view(-1, row).copy_(values)
        return restore(flat, layout)

    def _scale(self, blocks: Tensor, scales: Tensor, codes: Tensor) -> None:
        room = blocks.abs()
        peak = room.amax(1)
        finite = peak.isfinite()
        if blocks.device.type == "cpu" and bool(finite.all()):
            scale = _scale_of(peak / self.top)
            scales.copy_(scale)
            scaled = torch.div(blocks, scale.unsqueeze(1), out=room)
            codes.copy_(self._round(scaled).view(-1))
            return

        # From here on blocks are not finite, or may not be; see Note [Non-finite blocks].
        tame = blocks.nan_to_num(0, 0, 0)
        top = torch.where(finite, self.top, self.top_beside).to(peak.dtype)
        scale = _scale_of(torch.abs(tame, out=room).amax(1) / top)
        scales.copy_(torch.where(finite, scale, -scale))
        coded = self._round(tame / scale.unsqueeze(1))
        coded = torch.where(blocks.isinf(), blocks.sign() * self.top, coded)
        codes.copy_(self._mark(coded, blocks.isnan()).view(-1))

    def _unscale(self, values: Tensor, scales: Tensor) -> Tensor:
        beside = scales < 0
        if values.device.type == "cpu" and not bool(beside.any()):
            return values.mul_(scales.unsqueeze(1))

        result = values * scales.abs().unsqueeze(1)
        beside = beside.unsqueeze(1)
        infinite = beside & (values.abs() == self.top)
        result = torch.where(infinite, values.sign() * float("inf"), result)
        return torch.where(beside & self._marked(values), float("nan"), result)

    def _widen(self, codes: Tensor, work: torch.dtype) -> Tensor:
        return codes.to(work)

    def _round(self, scaled: Tensor) -> Tensor:
        raise NotImplementedError

    def _mark(self, coded: Tensor, nans: Tensor) -> Tensor:
        raise NotImplementedError

    def _marked(self, values: Tensor) -> Tensor:
        raise NotImplementedError


class Int8(Blockwise):
    """Rounding to 255 even steps.

    The error is at most 1/254 of the largest magnitude in the block of 256. NaN and infinities come
    back as they are; beside one, the error is at most 1/252 of the largest finite magnitude.
    """

    name = "int8"
    code = torch.int8
    top = 127.0
    top_beside = 126.0

    def _round(self, scaled: Tensor) -> Tensor:
        return scaled.round_()

    def _mark(self, coded: Tensor, nans: Tensor) -> Tensor:
        return coded.masked_fill_(nans, -128.0)

    def _marked(self, values: Tensor) -> Tensor:
        return values == -128.0


class Fp8(Blockwise):
    """Rounding to float8: 4 bits of exponent, 3 of mantissa.

    The error is at most 1/16 of each value. Values below 1/28672 of the largest in the block of 256
    have an error of at most 1/458752 of it instead. NaN and infinities come back as they are.
    """

    name = "fp8"
    code = torch.float8_e4m3fn
    top = 448.0
    top_beside = 416.0

    def _widen(self, codes: Tensor, work: torch.dtype) -> Tensor:
        # On a CPU, PyTorch's own cast takes three times as long as a table lookup of each code.
        if codes.device.type == "cpu" and work is torch.float32:
            return _values().take(codes.view(torch.uint8).long())
        return codes.to(work)

    def _round(self, scaled: Tensor) -> Tensor:
        return scaled  # the copy into the codes rounds

    def _mark(self, coded: Tensor, nans: Tensor) -> Tensor:
        return coded.masked_fill_(nans, float("nan"))

    def _marked(self, values: Tensor) -> Tensor:
        return values.isnan()


@cache
def _values() -> Tensor:
    """The value of each float8 code."""
    with torch.inference_mode(mode=False):
        return torch.arange(256, dtype=torch.uint8).view(Fp8.code).float()


def _blocks_of(size: int) -> int:
    """Return the number of blocks of so many elements; the last one may be shorter."""
    return -(-size // BLOCK)


def _parts(kept: Tensor, count: int, work: torch.dtype, code: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scales and the codes in a row of bytes; the scales are first, to be aligned."""
    split = count * work.itemsize
    return kept[:split].view(work), kept[split:].view(code)


def _pieces(size: int, kind: str) -> Iterator[tuple[int, int, int]]:
    """Yield first and last element of each piece, and the elements of a block in it.

    Only the last piece may have fewer than `BLOCK`: it is the rest, smaller than a block.
    """
    step = _AT_ONCE * BLOCK if kind == "cpu" else _AT_ONCE_FARTHER * BLOCK
    whole = size // BLOCK * BLOCK
    for first in range(0, whole, step):
        yield first, min(first + step, whole), BLOCK
    if whole < size:
        yield whole, size, size - whole


def _scale_of(ratio: Tensor) -> Tensor:
    """Return a scale, rounded down; see Note [The scale's last bit]."""
    known = torch.finfo(ratio.dtype)
    return (ratio * (1 - known.eps)).clamp_(min=known.tiny)
