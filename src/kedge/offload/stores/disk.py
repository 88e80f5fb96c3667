"""The disk store: saved tensors in a file.

While memory is free, a put is one write into the system's file cache, and a get maps it: nothing
waits for the disk, and nothing is copied on the way back. When memory is short, or on request, a
window with the bytes put last stays in memory, and older ones are written out and dropped, to be
read ahead in reverse order.
"""

from __future__ import annotations

import os
import time
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.errors import ChecksumMismatch, StoreError
from kedge.offload.stores.file_ranges import FileRange, RangeFile, memory_of
from kedge.offload.stores.pressure import Pressure
from kedge.offload.stores.writer import MemoryWindow

WINDOW = 96 << 20
_CHECK_EVERY = 32 << 20  # bytes put between two readings of the system's memory
_CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class DiskSlot:
    """Bytes on disk.

    Attributes:
        file: The open file of the store.
        extent: Their range in the file.
        nbytes: The number of bytes.
        device: The device that they came from.
        checksum: The checksum of the bytes put; None without checksums.
    """

    file: OpenFile
    extent: FileRange
    nbytes: int
    device: torch.device
    checksum: int | None

    def get(self) -> Tensor:
        """Return the bytes, on the device that they came from; the caller may change the result.

        Raises:
            StoreError: They cannot be read.
            ChecksumMismatch: They are not the bytes that were put.
        """
        data = self.file.read(self.extent, self.checksum)
        return data if self.device == _CPU else data.to(self.device)

    def prefetch(self) -> None:
        """Read the bytes into memory in the background, if they are not in memory."""
        self.file.prefetch(self.extent)

    def free(self) -> None:
        """Release the range; callable from any thread, at any time."""
        self.file.ranges.release(self.extent)


class DiskStore:
    """The store that puts bytes into one unnamed file.

    Args:
        path: A folder; None: the folder for temporary files.
        uncached: Whether the store keeps the file out of memory. None: when memory is short.
        checksum: Whether to compare the bytes read with a checksum (CRC-32) of the bytes put.

    Raises:
        StoreError: The folder cannot be used, or the system cannot keep a file out of memory
            (`uncached`).
    """

    name = "disk"

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        uncached: bool | None = None,
        checksum: bool = False,
    ) -> None:
        if uncached and not hasattr(os, "posix_fadvise"):
            raise StoreError(
                "Disk(uncached=True): this system cannot keep a file out of its file cache; leave `uncached` out"
            )
        self._path = path
        self._uncached = uncached
        self._checksum = checksum
        self._open = OpenFile(path, uncached, checksum)

    def takes(self, device: torch.device) -> bool:
        """Whether moving bytes from this device frees memory: for all devices but ``"meta"``."""
        return device.type != "meta"

    def put(self, data: Tensor) -> DiskSlot:
        """Write bytes; after the return they are in the file, whatever happens to the tensor.

        Raises:
            DiskFull: There is no room for them.
            StoreError: They cannot be written.
        """
        ranges = self._open.ranges
        if (
            ranges.lost or ranges.file.taken
        ):  # after a fork, or the program has closed it: no slot of it can be read
            self._open = OpenFile(self._path, self._uncached, self._checksum)
        return self._open.put(data)

    def close(self) -> None:
        """End the threads, and close the file as soon as the last slot is freed."""
        self._open.close()

    def __str__(self) -> str:
        return str(self._open)


class OpenFile:
    """The file of a store in one process, and its figures."""

    def __init__(
        self, path: str | os.PathLike[str] | None, uncached: bool | None, checksum: bool
    ) -> None:
        self.window = MemoryWindow(WINDOW)
        self.ranges = RangeFile(path, self.window.add, self.window.forget)
        self._pressure = Pressure() if uncached is None and hasattr(os, "posix_fadvise") else None
        self._tight = bool(uncached)
        self._checksum = checksum
        self._checked = self._read = 0
        self._summing = 0.0

    def put(self, data: Tensor) -> DiskSlot:
        """Write bytes; see `DiskStore.put`."""
        if self.window.failed:
            failed, self.window.failed = self.window.failed, None
            raise StoreError(
                f"the disk of {self.ranges.file.folder} failed to write an earlier saved tensor: {failed}"
            )
        host = data if data.device == _CPU else data.to(_CPU)
        tight = self._is_tight(with_more=host.nbytes)
        extent = self.ranges.put(host)
        checksum = self._sum(host) if self._checksum else None
        if tight:
            self.window.squeeze(self.ranges)
        return DiskSlot(self, extent, extent.nbytes, data.device, checksum)

    def read(self, extent: FileRange, checksum: int | None) -> Tensor:
        """Return the bytes of a range, in CPU memory."""
        if self._tight:
            self.window.read_ahead(self.ranges, extent)
        data = self.ranges.read(extent)
        self._read += extent.nbytes
        if checksum is not None and (found := self._sum(data)) != checksum:
            raise ChecksumMismatch(
                f"a saved tensor of {extent.nbytes:,} bytes came back from {self.ranges.file.folder} with CRC-32 {found:08x}"
                f" and was written with {checksum:08x}: the disk or the memory is at fault; name a folder on another disk"
            )
        return data

    def prefetch(self, extent: FileRange) -> None:
        """Read a range ahead."""
        if self._tight and not self.ranges.lost:
            self.window.prefetch(self.ranges, extent)

    def close(self) -> None:
        """End the threads, and close the file as soon as the last slot is freed."""
        if not self.ranges.lost:
            self.window.end()
            self._tight = False
        self.ranges.close()

    def _is_tight(self, with_more: int) -> bool:
        """Whether older bytes have to leave memory after so many more are put."""
        written = self.ranges.written + with_more
        if self._pressure is not None and written - self._checked >= _CHECK_EVERY:
            self._checked = written
            self._tight = self._pressure.tight(self.ranges.used + with_more)
        return self._tight

    def _sum(self, data: Tensor) -> int:
        begun = time.perf_counter()
        found = zlib.crc32(memory_of(data)) if data.numel() else 0
        self._summing += time.perf_counter() - begun
        return found

    def __str__(self) -> str:
        text = (
            f"a file of {self.ranges.size:,} bytes in {self.ranges.file.folder}: {self.ranges.pieces:,} tensors of "
            f"{self.ranges.written:,} bytes written, {self._read:,} bytes read, {self.window.out:,} bytes dropped "
            "from memory"
        )
        return f"{text}, {self._summing:.3f} s for checksums" if self._checksum else text
