"""The bfloat16 codec."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kedge.offload.codecs.layout import flatten, restore


class Bf16:
    """Rounding of float32 to bfloat16: 2 bytes an element, the same range, 8 bits of precision.

    The error is at most 1/256 of each value. NaN and infinities stay; a finite value beyond
    3.39e38, which is nearer to bfloat16's infinity than to its largest number, becomes infinite, as
    in any such cast.
    """

    name: str = "bf16"
    exact: bool = False

    def encode(self, value: Tensor) -> tuple[Tensor, Any] | None:
        """Return the bytes in bfloat16, and the layout.

        Returns:
            None unless the tensor is float32 and not empty.
        """
        if value.dtype is not torch.float32 or not value.numel():
            return None
        found = flatten(value.detach())
        if found is None:
            return None
        flat, layout = found
        return flat.to(torch.bfloat16).view(torch.uint8), layout

    def decode(self, kept: Tensor, extra: Any) -> Tensor:
        """Return the tensor in float32, in its layout."""
        return restore(kept.view(torch.bfloat16), extra)
