"""One file without a name, and ranges of it that hold bytes.

# Note [Who gives ranges back]
A range is held by its slot and by each map of it, and is free when none is left. Both are let go of by whoever
drops the last reference: any thread, also the garbage collector in the middle of a method here that holds the
lock. So `release` never waits: it puts the range on a queue, which is worked off by whoever holds the lock, or has it
free. A thread that has let go of the lock looks at the queue once more, so nothing stays on it.

# Note [Forked processes]
A child inherits the file, and the parent goes on using it. The child closes its descriptor at once, so that
the file's room is the parent's to give back; it can neither read nor write what the parent saved.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kedge.errors import StoreError
from kedge.offload.stores.free_ranges import FreeRanges
from kedge.offload.stores.mapped import can_map, map_range, memory_of
from kedge.offload.stores.scratch import open_scratch, refused

PAGE = mmap.ALLOCATIONGRANULARITY
GROWTH = 64 << 20
_PADDING = bytes(PAGE)
_open: weakref.WeakSet[RangeFile] = weakref.WeakSet()


class FileRange:
    """A range of the file.

    Attributes:
        start: Where it begins.
        nbytes: How many bytes were put.
        room: How many the file has for them: whole pages.
        number: The first that was put is 1, the next is 2, ...
        holders: Who needs it: its slot, and each map of it. None: it is free.
        out: Whether the system was told to write it to the disk and drop it from memory.
    """

    __slots__ = ("holders", "nbytes", "number", "out", "room", "start")

    def __init__(self, start: int, nbytes: int, number: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self.room = pages(nbytes)
        self.number = number
        self.holders = 1
        self.out = False


def pages(nbytes: int) -> int:
    """Return the bytes of as many whole pages as this many bytes need; one at least."""
    return max(1, -(-nbytes // PAGE)) * PAGE


class RangeFile:
    """A file for bytes that come and go.

    Args:
        path: Its folder; None: the one for temporary files.
        freed: Called with each range that became free, under the lock.

    Raises:
        StoreError: The folder cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str] | None, freed: Callable[[FileRange], None] | None = None) -> None:
        self.file, self.folder = open_scratch(path)
        self.lock = threading.Lock()
        self.lost = False  # to a fork, see Note [Forked processes]
        self._closing = False
        self._extents = FreeRanges()
        self._freed = freed
        self._count = 0
        self._released: deque[FileRange] = deque()
        _open.add(self)

    @property
    def used(self) -> int:
        """How many bytes of the file are taken."""
        return self._extents.used

    @property
    def size(self) -> int:
        """How many bytes the file has on its disk."""
        return self._extents.size

    def put(self, data: Tensor) -> FileRange:
        """Write the bytes of a tensor in CPU memory; when this returns, the system has them.

        Raises:
            DiskFull: There is no room for them.
            StoreError: They cannot be written.
        """
        with self.locked():
            extent = self._take(data.nbytes)
        try:
            self._write(extent, memory_of(data))
        except OSError as error:
            self.release(extent)
            raise refused(error, self.file, self.folder, extent.room) from error
        return extent

    def read(self, extent: FileRange) -> Tensor:
        """Return the bytes of a range: a private map of the file where the system can, else a copy.

        Raises:
            StoreError: They cannot be read.
        """
        if self.lost:
            raise StoreError(
                "a saved tensor on disk was asked for in a process that was forked after it was saved;"
                " run forward and backward in the same process"
            )
        try:
            return self._mapped(extent) if can_map() and extent.nbytes else self._copied(extent)
        except OSError as error:
            raise StoreError(
                f"a saved tensor of {extent.nbytes:,} bytes cannot be read back from {self.folder}:"
                f" {error.strerror or error}; name a folder on another disk, and run again"
            ) from error

    def release(self, extent: FileRange, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Let go of a range; see Note [Who gives ranges back]."""
        if not _ending():
            self._released.append(extent)
            self._work_off()

    def close(self) -> None:
        """Close the file as soon as no range of it is held."""
        with self.locked():
            self._closing = True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, and afterwards work off what was released meanwhile."""
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
        elif self._closing and not self._extents.used:
            self._close_file()

    def _let_go(self, extent: FileRange) -> None:
        extent.holders -= 1
        if extent.out:
            # What was read of it is still in memory, and has to be read again to be used again.
            os.posix_fadvise(self.file, extent.start, extent.room, os.POSIX_FADV_DONTNEED)
        if not extent.holders:
            self._extents.give(extent.start, extent.room)
            if self._freed:
                self._freed(extent)

    def _take(self, nbytes: int) -> FileRange:
        if self._closing or self.lost:
            raise StoreError("a saved tensor was to go to a disk store that is closed; offload inside the block")
        room = pages(nbytes)
        start = self._extents.take(room)
        if start is None:
            self._grow(room)
            start = self._extents.take(room)
        assert start is not None  # noqa: S101 - it has just grown by what was missing
        self._count += 1
        return FileRange(start, nbytes, self._count)

    def _grow(self, room: int) -> None:
        least = self._extents.missing(room)
        try:
            self._allocate(max(least, GROWTH))
        except OSError:
            try:
                self._allocate(least)
            except OSError as error:
                raise refused(error, self.file, self.folder, least) from error

    def _allocate(self, more: int) -> None:
        size = self._extents.size
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.file, size, more)
            else:
                os.ftruncate(self.file, size + more)  # and a full disk shows when it is written to
        except OSError:
            os.ftruncate(self.file, size)
            raise
        self._extents.grow(more)

    def _write(self, extent: FileRange, memory: memoryview) -> None:
        # Up to the end of its last page: a page of which a part is written has to be read from the disk first.
        padding = memoryview(_PADDING)[: extent.room - extent.nbytes]
        written = 0
        while written < extent.nbytes:
            written += os.pwritev(self.file, [memory[written:], padding], extent.start + written)

    def _mapped(self, extent: FileRange) -> Tensor:
        with self.locked():
            extent.holders += 1
        try:
            return map_range(self.file, extent.start, extent.nbytes, lambda: self.release(extent))
        except OSError:
            self.release(extent)
            raise

    def _copied(self, extent: FileRange) -> Tensor:
        data = torch.empty(extent.nbytes, dtype=torch.uint8)
        memory = memory_of(data)
        done = 0
        while done < extent.nbytes:
            got = os.preadv(self.file, [memory[done:]], extent.start + done)
            if not got:
                raise OSError("the file ends before it")
            done += got
        return data

    def _close_file(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def _lose(self) -> None:
        self.lock = threading.Lock()  # whoever held the old one is not in this process
        self.lost = True
        self._close_file()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending() and hasattr(self, "file"):
            self._close_file()


def _lose_all() -> None:
    for arena in _open:
        arena._lose()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lose_all)
