"""The disk store: saved tensors in files.

While memory is free, a put is one write into the system's file cache, and a get maps it: nothing
waits for the disk, and nothing is copied on the way back. When memory is short, or on request, a
window with the bytes put last stays in memory, and older ones are written out and dropped, to be
read ahead in reverse order.

# Note [Several files]
A file is written from its front only when all that was in it is freed (Note [Front to back] in
`kedge.offload.stores.unnamed_file`), and a program may keep a graph for longer than the others. So
the store has several files: each new one may have as many bytes as a quarter of all others, and no
more than that waits for one tensor.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kedge.errors import ChecksumMismatch, StoreError
from kedge.files.pressure import Pressure
from kedge.offload.stores.memory_window import MemoryWindow
from kedge.offload.stores.unnamed_file import GROWTH, Piece, UnnamedFile, memory_of, pages

WINDOW = 96 << 20
_CHECK_EVERY = 32 << 20  # bytes put between two readings of the system's memory
_PART = 4  # of all bytes: the part that a new file may have; see Note [Several files]
_CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class DiskSlot:
    """Bytes on disk.

    Attributes:
        files: The files of the store.
        piece: Their place in one of them.
        nbytes: The number of bytes.
        device: The device that they came from.
        checksum: The checksum of the bytes put; None without checksums.
    """

    files: StoreFiles
    piece: Piece
    nbytes: int
    device: torch.device
    checksum: int | None

    def get(self) -> Tensor:
        """Return the bytes, on the device that they came from; the caller may change the result.

        Raises:
            StoreError: They cannot be read.
            ChecksumMismatch: They are not the bytes that were put.
        """
        data = self.files.read(self.piece, self.checksum)
        if self.device == _CPU:
            return data
        return data.to(self.device)

    def prefetch(self) -> None:
        """Read the bytes into memory in the background, if they are not in memory."""
        self.files.prefetch(self.piece)

    def free(self) -> None:
        """Release the bytes; callable from any thread, at any time."""
        self.files.free(self.piece)


class DiskStore:
    """The store that puts bytes into unnamed files.

    Args:
        path: A folder; None: the folder for temporary files.
        uncached: Whether the store keeps the files out of memory. None: when memory is short.
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
                "Disk(uncached=True): this system cannot keep a file out of its file cache; "
                "leave `uncached` out"
            )
        self._new = partial(StoreFiles, path, uncached, checksum)
        self._files = self._new()

    def takes(self, device: torch.device) -> bool:
        """Whether moving bytes from this device frees memory: for all devices but ``"meta"``."""
        return device.type != "meta"

    def put(self, data: Tensor) -> DiskSlot:
        """Write bytes; after the return they are in a file, whatever happens to the tensor.

        Raises:
            DiskFull: There is no room for them.
            StoreError: They cannot be written.
        """
        if self._files.lost:
            self._files = self._new()
        return self._files.put(data)

    def close(self) -> None:
        """End the threads, and close each file as soon as the last slot in it is freed."""
        self._files.close()

    def __str__(self) -> str:
        return str(self._files)


class StoreFiles:
    """The files of a store in one process, and their figures.

    Attributes:
        window: The bytes of them that stay in memory.
        puts: The number of tensors put.
        count: The number of files.
        size: The bytes that they have on their disk.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, uncached: bool | None, checksum: bool
    ) -> None:
        first = UnnamedFile(path, GROWTH)
        self.window = MemoryWindow(WINDOW)
        self.puts = 0
        self.size = 0
        self.count = 1
        self._path = path
        self._folder = first.folder
        self._files = [first]
        self._lock = threading.RLock()  # a collection meanwhile may close the store
        self._pressure: Pressure | None = None
        if uncached is None and hasattr(os, "posix_fadvise"):
            self._pressure = Pressure()
        self._tight = bool(uncached)
        self._checksum = checksum
        self._closed = False
        self._written = 0
        self._checked = 0
        self._read = 0
        self._summing = 0.0

    @property
    def lost(self) -> bool:
        """Whether nothing can be written.

        This process is a fork, or the program has closed the newest file.
        """
        return not self._closed and self._files[-1].lost

    @property
    def used(self) -> int:
        """The bytes of the files that are taken."""
        return sum(file.used for file in self._files)

    def put(self, data: Tensor) -> DiskSlot:
        """Write bytes; see `DiskStore.put`."""
        failed = self.window.failed
        if failed:
            self.window.failed = None
            raise StoreError(
                f"the disk of {self._folder} failed to write an earlier saved tensor: {failed}"
            )
        host = data if data.device == _CPU else data.to(_CPU)
        memory = memory_of(host)

        with self._lock:
            file, piece = self._take(len(memory))
            self.puts += 1
            self._written += piece.nbytes
        try:
            file.write(piece, memory)
        except StoreError:
            with self._lock:
                self.puts -= 1
                self._written -= piece.nbytes
            raise

        checksum = None
        if self._checksum:
            checksum = self._sum(host)
        self.window.add(piece)
        if self._is_tight():
            self.window.squeeze()
        return DiskSlot(self, piece, piece.nbytes, data.device, checksum)

    def _take(self, nbytes: int) -> tuple[UnnamedFile, Piece]:
        """Return the place of so many bytes, and its file; see Note [Several files]."""
        if self._closed:
            raise StoreError(
                "a saved tensor cannot be written: the disk store is closed; "
                "offload inside the block"
            )
        room = pages(nbytes)
        for file in self._files:
            if file.used + room <= file.most:
                break
        else:
            part = sum(each.size for each in self._files) // _PART
            # Files that are empty, and too small for this tensor, leave the disk.
            self._files = [each for each in self._files if each.used]
            file = UnnamedFile(self._path, max(room, part, GROWTH))
            self._files.append(file)

        piece = file.take(nbytes, self.puts + 1)
        self.count = len(self._files)
        self.size = sum(file.size for file in self._files)
        return file, piece

    def read(self, piece: Piece, checksum: int | None) -> Tensor:
        """Return the bytes of a piece, in CPU memory."""
        filling = piece.filling
        assert filling is not None  # noqa: S101 - it is read before it is freed
        if self._tight and not filling.file.closed:
            self.window.read_ahead(piece)
        data = filling.file.read(piece, filling)
        self._read += piece.nbytes

        if checksum is None:
            return data
        found = self._sum(data)
        if found != checksum:
            raise ChecksumMismatch(
                f"a saved tensor of {piece.nbytes:,} bytes came back from {self._folder} "
                f"with CRC-32 {found:08x} and was written with {checksum:08x}: "
                "the disk or the memory is at fault; name a folder on another disk"
            )
        return data

    def prefetch(self, piece: Piece) -> None:
        """Read a piece ahead."""
        filling = piece.filling
        if self._tight and filling is not None and not filling.file.closed:
            self.window.prefetch(piece)

    def free(self, piece: Piece, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Free a piece, without waiting for a lock."""
        filling = piece.filling
        if filling is not None and not _ending():
            self.window.freed.append(piece)
            piece.leave_memory(filling)
            piece.filling = None

    def close(self) -> None:
        """End the threads, and close each file as soon as the last slot in it is freed."""
        if any(file.closed for file in self._files):
            return  # a fork has neither the threads nor the thread that may hold the lock
        self.window.end()
        self._tight = False
        with self._lock:
            self._closed = True
            self._files = []  # a file lives on with what is in it

    def _is_tight(self) -> bool:
        """Whether older bytes have to leave memory."""
        if self._pressure is not None and self._written - self._checked >= _CHECK_EVERY:
            self._checked = self._written
            self._tight = self._pressure.tight(self.used)
        return self._tight

    def _sum(self, data: Tensor) -> int:
        if not data.numel():
            return 0
        begun = time.perf_counter()
        found = zlib.crc32(memory_of(data))
        self._summing += time.perf_counter() - begun
        return found

    def __str__(self) -> str:
        files = "a file" if self.count == 1 else f"{self.count} files"
        text = (
            f"{files} of {self.size:,} bytes in {self._folder}: {self.puts:,} tensors "
            f"of {self._written:,} bytes written, {self._read:,} bytes read, "
            f"{self.window.out:,} bytes dropped from memory"
        )
        if self._checksum:
            text += f", {self._summing:.3f} s for checksums"
        return text
