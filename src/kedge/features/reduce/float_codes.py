"""Floating-point numbers as integers of the same order, cut to so many digits.

# Note [Codes]
Of a float32 that is not negative the bits, read as an integer, grow with it (IEEE 754). Its code is that integer without
its last ``23 - digits`` bits: `digits` of the mantissa are kept, so 2^digits codes stand for one power of two. A
negative number has the complement of its magnitude's code, -1 for the smallest. So codes have the order of the numbers,
and counts of codes give quantiles; all numbers of one code differ by less than one part in ``2^digits``. Of the two zeros
only 0.0 has a code.
"""

from __future__ import annotations

import torch
from torch import Tensor

MANTISSA = 23
_EXPONENTS = 255
_MAGNITUDE = 0x7FFFFFFF


def encode(values: Tensor, digits: int) -> tuple[Tensor, Tensor]:
    """Return the codes of float32 values, and the bits of their magnitudes that are cut off; those of NaN mean nothing."""
    bits = values.contiguous().view(torch.int32)
    magnitude = (bits & _MAGNITUDE).long()
    codes = magnitude >> (MANTISSA - digits)
    return torch.where(bits < 0, ~codes, codes), magnitude & ((1 << (MANTISSA - digits)) - 1)


def decode(codes: Tensor, rest: Tensor | int, digits: int) -> Tensor:
    """Return the numbers with these codes and these bits after them, in float64."""
    magnitude = (torch.where(codes < 0, ~codes, codes) << (MANTISSA - digits)) + rest
    numbers = magnitude.to(torch.int32).view(torch.float32).double()
    return torch.where(codes < 0, -numbers, numbers)


def middle(codes: Tensor, digits: int) -> Tensor:
    """Return the number half-way between those of the least and the greatest magnitude of each code, in float64."""
    last = (1 << (MANTISSA - digits)) - 1
    codes_of_infinity = (codes == _EXPONENTS << digits) | (codes == ~(_EXPONENTS << digits))
    farthest = torch.where(codes_of_infinity, 0, last)
    return (decode(codes, 0, digits) + decode(codes, farthest, digits)) / 2
