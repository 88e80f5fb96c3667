"""The interface of codecs, which store a saved tensor in fewer bits."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Codec(Protocol):
    """A codec: encodes a tensor into fewer bytes, and decodes them.

    Attributes:
        name: The name that a user passes.
        exact: Whether decoded tensors are equal to the last bit.
    """

    name: str
    exact: bool

    def encode(self, value: Tensor) -> tuple[Tensor, Any] | None:
        """Return the bytes to keep, as a flat contiguous tensor, and the extra argument for `decode`.

        Returns:
            None if the codec does not apply to this tensor: keep it as it is.
        """

    def decode(self, kept: Tensor, extra: Any) -> Tensor:
        """Return a tensor in memory of its own, laid out as the encoded one.

        It has the same shape, dtype, device and strides.
        """
