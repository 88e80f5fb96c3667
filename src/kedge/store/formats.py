"""Number formats, with the largest and the smallest number of each.

IEEE 754 for float16, float32 and float64; bfloat16 as in its hardware definition; the two 8-bit
formats as in "FP8 Formats for Deep Learning" (Micikevicius et al., 2022). They equal
``torch.finfo``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class NumberFormat:
    """One number format.

    Attributes:
        name: PyTorch's name for it.
        largest: The largest finite number.
        smallest_normal: The smallest number with full precision.
        smallest: The smallest number above zero, a subnormal one.
    """

    name: str
    largest: float
    smallest_normal: float
    smallest: float

    @property
    def lowest_power(self) -> int:
        """The exponent of ``smallest_normal``, a power of two."""
        return int(math.log2(self.smallest_normal))

    def headroom(self, magnitude: float) -> float:
        """Return the number of doublings that a number can take before it overflows."""
        if magnitude <= 0:
            return math.inf
        return math.log2(self.largest / magnitude)

    def depth(self, magnitude: float) -> float:
        """Return the number of halvings that a number can take before it loses precision."""
        if magnitude <= 0:
            return -math.inf
        return math.log2(magnitude / self.smallest_normal)


_ALL = (
    NumberFormat("float64", (2 - 2.0**-52) * 2.0**1023, 2.0**-1022, 5e-324),
    NumberFormat("float32", (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149),
    NumberFormat("bfloat16", (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133),
    NumberFormat("float16", 65504.0, 2.0**-14, 2.0**-24),
    NumberFormat("float8_e5m2", 57344.0, 2.0**-14, 2.0**-16),
    NumberFormat("float8_e4m3fn", 448.0, 2.0**-6, 2.0**-9),
)

#: Every format by its name, the widest first.
FORMATS: dict[str, NumberFormat] = {each.name: each for each in _ALL}
