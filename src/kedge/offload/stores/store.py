"""What holds moved bytes: a store gives a slot for them, a slot gives them back.

The engine makes stores: ``DiskStore(path, uncached=..., checksum=...)`` and ``CpuStore(pin=...)``. It asks
`Store.takes` first, and keeps by reference what is not taken (a tensor in CPU memory is not moved to CPU memory).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

FULL = (OSError, MemoryError, torch.OutOfMemoryError)
"""What is raised where there is no room: in a store, or on a device."""


class StoreSlot(Protocol):
    """Bytes that a store holds.

    Attributes:
        nbytes: How many bytes were put.
    """

    nbytes: int

    def get(self) -> Tensor:
        """Return the bytes as a 1-D uint8 tensor on the device that they came from.

        It may be called several times, by any thread. What is returned is the caller's own: changing it changes
        neither the slot nor what another call returned. It begins at a multiple of 16 bytes of its storage.
        """

    def prefetch(self) -> None:
        """Begin to bring the bytes, which are needed soon; doing nothing is right too."""

    def free(self) -> None:
        """Release the place of the bytes.

        It is called once, when they cannot be asked for any more: by any thread, from a ``__del__`` - so also by
        the garbage collector in the middle of another method of the store, in the same thread - and at the
        interpreter's exit. It must not raise and must not wait for a lock that such a method holds.
        """


class Store(Protocol):
    """A place for bytes.

    Attributes:
        name: What the account calls it: "disk", "cpu".
    """

    name: str

    def takes(self, device: torch.device) -> bool:
        """Whether moving bytes from this device here frees memory there."""

    def put(self, data: Tensor) -> StoreSlot:
        """Take bytes.

        Args:
            data: A contiguous 1-D uint8 tensor, an alias of what the program may change in place any time later.
                It shares the version counter of the program's tensor (``data._version``). The bytes to be kept
                are those of now: a store that copies in the background copies first, or makes sure by the version.

        Raises:
            OSError: There is no room, or the place cannot be written; the tensor is then kept by reference.
            MemoryError: As above.
        """

    def close(self) -> None:
        """Release everything that no slot needs; slots still alive work until they are freed. Idempotent."""
