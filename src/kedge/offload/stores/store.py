"""Stores and their slots: `put` returns a slot for moved bytes, and the slot returns the bytes.

`kedge.offload` makes the stores: ``DiskStore(path, uncached=..., checksum=...)`` and
``CpuStore(pin=...)``. The engine calls `Store.takes` first, and keeps by reference what the store
does not take (a tensor in CPU memory is not moved to CPU memory).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

FULL = (OSError, MemoryError, torch.OutOfMemoryError)
"""The errors raised when there is no room in a store, or on a device."""


class StoreSlot(Protocol):
    """Bytes that a store holds.

    Attributes:
        nbytes: The number of bytes put.
    """

    nbytes: int

    def get(self) -> Tensor:
        """Return the bytes as a 1-D uint8 tensor on the device that they came from.

        Any thread may call it, several times. The result is the caller's own: changing it changes
        neither the slot nor the result of another call. It begins at a multiple of 16 bytes of its
        storage.
        """

    def prefetch(self) -> None:
        """Begin to bring the bytes back, as they are needed soon; may do nothing."""

    def free(self) -> None:
        """Release the place of the bytes.

        Called once, when no handle can read them any more: in any thread, from a ``__del__`` - so
        also by the garbage collector in the middle of another method of the store, in the same
        thread - and at the interpreter's exit. It must not raise and must not wait for a lock that
        such a method holds.
        """


class Store(Protocol):
    """A place for bytes.

    Attributes:
        name: Its name in the account: "disk", "cpu".
    """

    name: str

    def takes(self, device: torch.device) -> bool:
        """Whether moving bytes from this device to the store frees memory there."""

    def put(self, data: Tensor) -> StoreSlot:
        """Store bytes, and return their slot.

        Args:
            data: A contiguous 1-D uint8 tensor, an alias of memory that the program may change in
                place any time later. It shares the version counter of the program's tensor
                (``data._version``). The slot holds the bytes of the time of the call: a store that
                copies in the background copies first, or checks the version.

        Raises:
            OSError: There is no room, or the store cannot write; the engine then keeps the tensor
                by reference.
            MemoryError: As above.
        """

    def close(self) -> None:
        """Release everything that no slot needs; live slots work until they are freed.

        Idempotent.
        """
