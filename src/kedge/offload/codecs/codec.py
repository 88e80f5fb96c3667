"""What stores a saved tensor in fewer bits."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Codec(Protocol):
    """Encodes a tensor into fewer bytes, and makes one like it of them.

    Attributes:
        name: What a user calls it.
        exact: Whether what comes back is equal to the last bit.
    """

    name: str
    exact: bool

    def encode(self, value: Tensor) -> tuple[Tensor, Any] | None:
        """Return the bytes to keep, as a flat contiguous tensor, and what `decode` needs besides.

        Returns:
            None if the codec does not apply to this tensor: keep it as it is.
        """

    def decode(self, kept: Tensor, extra: Any) -> Tensor:
        """Make a tensor with the shape, dtype, device and strides of the one that was encoded, in memory of its own."""
