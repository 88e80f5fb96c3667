"""An unnamed file, and ranges of it that hold bytes.

# Note [Release of ranges]
Its slot holds a range, and so does each map of it; the range is free when neither is left. The
thread that drops the last reference releases them: any thread, also the garbage collector in the
middle of a method here that holds the lock. So `release` never waits: it puts the range on a queue,
and the thread that holds the lock, or finds it free, empties that queue. A thread that has released
the lock checks the queue once more, so nothing stays on it.

# Note [Forked processes]
A child inherits the file, and the parent goes on using it. The child closes its descriptor at once,
so that the parent alone decides when the file's room is freed; the child can neither read nor write
what the parent saved.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.errors import StoreError
from kedge.files.own_file import DescriptorTaken
from kedge.offload.stores.free_ranges import FreeRanges
from kedge.offload.stores.mapped import can_map, map_range
from kedge.offload.stores.scratch import LEAVE_OPEN, open_scratch, refused

PAGE = mmap.ALLOCATIONGRANULARITY
GROWTH = 64 << 20
_PADDING = bytes(PAGE)
_open: weakref.WeakSet[RangeFile] = weakref.WeakSet()


@dataclass(slots=True, eq=False)
class FileRange:
    """A range of the file.

    Attributes:
        start: The offset in the file.
        nbytes: The number of bytes put.
        room: The bytes reserved for them in the file: whole pages.
        number: The number of the put: 1 for the first, 2 for the next, ...
        holders: The number of its holders: its slot, and each map of it. 0: it is free.
        out: Whether the system was asked to write it to the disk and drop it from memory.
    """

    start: int
    nbytes: int
    room: int
    number: int
    holders: int = 1
    out: bool = False


def pages(nbytes: int) -> int:
    """Return the size in bytes of the whole pages that so many bytes need; at least one page."""
    return max(1, -(-nbytes // PAGE)) * PAGE


def memory_of(data: Tensor) -> memoryview:
    """Return a view of a tensor's bytes, valid as long as the tensor lives."""
    nbytes = data.numel() * data.element_size()
    return memoryview((ctypes.c_ubyte * nbytes).from_address(data.data_ptr())).cast("B")


class UnnamedFile:
    """An unnamed file, written and read at offsets.

    Args:
        path: Its folder; None: the folder for temporary files.

    Attributes:
        folder: Its folder.

    Raises:
        StoreError: The folder cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._file, self.folder = open_scratch(path)

    @property
    def descriptor(self) -> int:
        """Its descriptor, for one use at once; -1 after `close`.

        Raises:
            DescriptorTaken: The program has closed the file.
        """
        return -1 if self._file.closed else self._file.fileno()

    @property
    def taken(self) -> bool:
        """Whether the program has closed the file, so that everything in it is lost."""
        try:
            return self.descriptor < -1
        except DescriptorTaken:
            return True

    def grow(self, size: int, least: int) -> int:
        """Reserve at least so many bytes behind a file of this size; returns the number reserved.

        Raises:
            StoreError: There is no room for them.
        """
        try:
            return self._allocate(size, max(least, GROWTH))
        except OSError:
            try:
                return self._allocate(size, least)
            except OSError as error:
                raise refused(error, self.folder, least) from error

    def write(self, start: int, memory: memoryview, room: int) -> None:
        """Write bytes at an offset, padded to the end of their room."""
        # The system would have to read a partly written page from the disk first.
        padding = memoryview(_PADDING)[: room - len(memory)]
        written = 0
        try:
            while written < len(memory):
                written += os.pwritev(self.descriptor, [memory[written:], padding], start + written)
        except OSError as error:
            raise refused(error, self.folder, room) from error

    def copied(self, start: int, nbytes: int) -> Tensor:
        """Return a copy of the bytes at an offset, as a uint8 tensor."""
        data = torch.empty(nbytes, dtype=torch.uint8)
        memory = memory_of(data)
        done = 0
        while done < nbytes:
            got = os.preadv(self.descriptor, [memory[done:]], start + done)
            if not got:
                raise OSError("the file ends too early")
            done += got
        return data

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def advise(self, extent: FileRange, advice: int) -> None:
        """Advise the system about a range, unless the program has closed the file."""
        if not self.taken:
            os.posix_fadvise(self.descriptor, extent.start, extent.room, advice)

    def _allocate(self, size: int, more: int) -> int:
        descriptor = self.descriptor
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, size, more)
            else:
                os.ftruncate(descriptor, size + more)  # a full disk then fails the write
        except OSError:
            os.ftruncate(self.descriptor, size)
            raise
        return more


class RangeFile:
    """A file whose ranges are taken and freed.

    Args:
        path: Its folder; None: the one for temporary files.
        taken: Called under the lock with each range that is taken, before its bytes are written.
        freed: Called under the lock with each range that became free.

    Attributes:
        file: The file.
        lock: Held while ranges are taken and freed.
        lost: Whether this process is a fork that cannot use the file; see Note [Forked processes].
        pieces: The number of ranges put.
        written: The bytes put.

    Raises:
        StoreError: The folder cannot be used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        taken: Callable[[FileRange], None] | None = None,
        freed: Callable[[FileRange], None] | None = None,
    ) -> None:
        self.file = UnnamedFile(path)
        self.lock = threading.Lock()
        self.lost = self._closing = False
        self.pieces = self.written = 0
        self._ranges, self._numbers = FreeRanges(), itertools.count(1)
        self._taken, self._freed = taken, freed
        self._released: deque[FileRange] = deque()
        _open.add(self)

    @property
    def used(self) -> int:
        """The bytes of the file that are taken."""
        return self._ranges.used

    @property
    def size(self) -> int:
        """The bytes that the file has on its disk."""
        return self._ranges.size

    def put(self, data: Tensor) -> FileRange:
        """Write the bytes of a tensor in CPU memory; after the return, the system has them.

        Raises:
            DiskFull: There is no room for them.
            StoreError: They cannot be written.
        """
        memory = memory_of(data)
        with self.locked():
            extent = self._take(len(memory))
        try:
            self.file.write(extent.start, memory, extent.room)
        except StoreError:
            with self.locked():
                self.pieces -= 1
                self.written -= extent.nbytes
            self.release(extent)
            raise
        return extent

    def read(self, extent: FileRange) -> Tensor:
        """Return the bytes of a range as a uint8 tensor: a private map of the file where the system can, else a copy.

        Raises:
            StoreError: They cannot be read.
        """
        if self.lost:
            raise StoreError(
                "a saved tensor on disk cannot be read in a process that was forked after it was saved; run forward "
                "and backward in the same process"
            )
        try:
            if can_map() and extent.nbytes:
                return self._mapped(extent)
            return self.file.copied(extent.start, extent.nbytes)
        except OSError as error:
            advice = (
                LEAVE_OPEN
                if isinstance(error, DescriptorTaken)
                else "name a folder on another disk, and run again"
            )
            raise StoreError(
                f"a saved tensor of {extent.nbytes:,} bytes cannot be read back from {self.file.folder}:"
                f" {error.strerror or error}; {advice}"
            ) from error

    def release(self, extent: FileRange, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Drop one holder of a range; see Note [Release of ranges]."""
        if not _ending():
            self._released.append(extent)
            self._work_off()

    def close(self) -> None:
        """Close the file as soon as none of its ranges is held."""
        with self.locked():
            self._closing = True

    def lose(self) -> None:
        """Close the file in a forked child, and mark it lost there; see Note [Forked processes]."""
        self.lock = threading.Lock()  # the thread that held the old lock is not in this process
        self.lost = True
        self.file.close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Context that holds the lock, and then frees the ranges released meanwhile."""
        try:
            with self.lock:
                yield
        finally:
            self._work_off(at_least_once=True)

    def _work_off(self, *, at_least_once: bool = False) -> None:
        while (self._released or at_least_once) and self.lock.acquire(blocking=False):
            at_least_once = False
            try:
                self._settle()
            finally:
                self.lock.release()

    def _settle(self) -> None:
        while self._released and not self.lost:
            self._let_go(self._released.popleft())
        if self.lost:
            self._released.clear()
        elif self._closing and not self._ranges.used:
            self.file.close()

    def _let_go(self, extent: FileRange) -> None:
        extent.holders -= 1
        if extent.out:
            # Reading it brought pages back into memory; drop them.
            self.file.advise(extent, os.POSIX_FADV_DONTNEED)
        if not extent.holders:
            self._ranges.release(extent.start, extent.room)
            if self._freed:
                self._freed(extent)

    def _take(self, nbytes: int) -> FileRange:
        if self._closing or self.lost:
            raise StoreError(
                "a saved tensor cannot be written: the disk store is closed; offload inside the block"
            )
        room = pages(nbytes)
        start = self._ranges.take(room)
        if start is None:
            self._ranges.grow(self.file.grow(self._ranges.size, self._ranges.missing(room)))
            start = self._ranges.take(room)
        assert start is not None  # noqa: S101 - it has just grown by the missing bytes
        extent = FileRange(start, nbytes, room, next(self._numbers))
        self.pieces += 1
        self.written += nbytes
        if self._taken:
            self._taken(extent)
        return extent

    def _mapped(self, extent: FileRange) -> Tensor:
        with self.locked():
            extent.holders += 1
        try:
            return map_range(
                self.file.descriptor, extent.start, extent.nbytes, lambda: self.release(extent)
            )
        except OSError:
            self.release(extent)
            raise

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending() and hasattr(self, "file"):
            self.file.close()


def _lose_all() -> None:
    for each in _open:
        each.lose()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lose_all)
