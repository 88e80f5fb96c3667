"""What of the file stays in memory: one thread writes out, one reads ahead.

# Note [When the bytes are taken]
A program may change a tensor in place right after it was saved, also by ways that move no version (``.data``). A write
in the background from its memory could be torn, and the bytes that were meant are gone then. So `RangeFile.put` copies them
to the system before it returns, with one `pwritev`, and what is in the background is only the way from the
system's memory to the disk. The same memory then answers who asks for what is not yet out, and a slot that is freed
first is not written at all. The system holds more of the file only by the bytes of the window.

# Note [Why no RWF_DONTCACHE]
A write with this flag (Linux 6.14) drops only pages that it brought into memory itself, so the thread, which finds those of
its range there, would copy them once more and drop none: of 310 MB on ext4 all stayed, instead of 105 as it is. In
`RangeFile.put` it would drop the window too, which is read first, and write what is freed first: puts took half as long then
and gets a third longer, both together the same within the noise (medians of 15: 0.42 s and 0.49 s).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

from kedge.offload.stores.file_ranges import FileRange, RangeFile
from kedge.offload.stores.mapped import LIBC

_Job: TypeAlias = Callable[[], None]
_WRITE_AND_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER
_LOOK_BACK = 64  # so many of the ranges put before the one that is read are looked at

if hasattr(LIBC, "sync_file_range"):
    LIBC.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class JobThread:
    """A thread that does one job after the other; it starts with the first, and ends when it is told or forgotten."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changing = threading.Lock()

    def do(self, job: _Job) -> None:
        """Do a job after those before it."""
        with self._changing:  # or two threads that come first at once would start one each
            if self._thread is None or not self._thread.is_alive():
                # It holds the queue alone, so that a store nobody closes can go all the same.
                self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
                self._thread.start()
            self._jobs.put(job)

    def end(self) -> None:
        """Do what is asked for already, and end."""
        with self._changing:
            if self._thread is not None and self._thread.is_alive():
                self._jobs.put(None)
                self._thread.join()
            self._thread = None

    def __del__(self) -> None:
        self._jobs.put(None)


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # or it would hold the arena while the thread waits


class MemoryWindow:
    """Bounds how much of an arena's file is in memory.

    Args:
        limit: How many bytes may stay in memory; as many again may be on their way out, and on their way in.

    Attributes:
        out: Bytes written out so far.
        failed: What the disk said when it took some of them, until it is told.
    """

    def __init__(self, limit: int) -> None:
        self.out = 0
        self.failed: OSError | None = None
        self._limit = limit
        self._known: dict[int, FileRange] = {}  # by number, so in the order of puts
        self._inside: dict[int, FileRange] = {}  # those of them that were not told to leave
        self._ahead: dict[int, FileRange] = {}  # those asked for before they are read
        self._held = self._leaving = self._coming = 0
        self._ended = False
        self._left = threading.Condition()
        self._writer = JobThread("kedge-writes-out")
        self._reader = JobThread("kedge-reads-ahead")

    def add(self, extent: FileRange) -> None:
        """Hear of a range that was put; under the arena's lock, as `forget`."""
        self._known[extent.number] = self._inside[extent.number] = extent
        self._held += extent.room

    def forget(self, extent: FileRange) -> None:
        """Hear that a range is free: it need not be written any more."""
        self._known.pop(extent.number, None)
        if self._inside.pop(extent.number, None):
            self._held -= extent.room
        if self._ahead.pop(extent.number, None):
            self._coming -= extent.room

    def squeeze(self, arena: RangeFile) -> None:
        """Let the oldest ranges leave memory until the rest is within the limit; wait if the disk is behind."""
        with arena.locked():
            leaving = []
            while self._held > self._limit:
                extent = self._inside.pop(next(iter(self._inside)))
                self._held -= extent.room
                leaving.append(extent)
        with self._left:
            self._leaving += sum(extent.room for extent in leaving)
        for extent in leaving:
            self._writer.do(partial(self._write_out, arena, extent))
        with self._left:
            self._left.wait_for(lambda: self._leaving <= self._limit)

    def read_ahead(self, arena: RangeFile, extent: FileRange) -> None:
        """Hear that a range is being read: those put before it will be next."""
        with arena.locked():
            if self._ahead.pop(extent.number, None):
                self._coming -= extent.room
            before = map(self._known.get, range(extent.number - 1, extent.number - 1 - _LOOK_BACK, -1))
            wanted = [found for found in before if found is not None and self._fetch(found)]
        self._bring(arena, wanted)

    def want(self, arena: RangeFile, extent: FileRange) -> None:
        """Hear that a range will be read."""
        with arena.locked():
            wanted = [extent] if self._fetch(extent) else []
        self._bring(arena, wanted)

    def end(self) -> None:
        """End both threads; what is not yet written out stays in memory."""
        self._ended = True
        self._writer.end()
        self._reader.end()

    def _fetch(self, extent: FileRange) -> bool:
        if not extent.out or extent.number in self._ahead or self._coming + extent.room > self._limit:
            return False
        self._ahead[extent.number] = extent
        self._coming += extent.room
        return True

    def _bring(self, arena: RangeFile, wanted: list[FileRange]) -> None:
        for extent in wanted:
            self._reader.do(partial(_advise, arena, extent, os.POSIX_FADV_WILLNEED))

    def _write_out(self, arena: RangeFile, extent: FileRange) -> None:
        try:
            if extent.holders and not self._ended:
                _sync(arena, extent)
                extent.out = True
                self.out += extent.room
                _advise(arena, extent, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            # The system still has the bytes in memory, so they are left there, and the next put is refused.
            self.failed = error
        finally:
            with self._left:
                self._leaving -= extent.room
                self._left.notify_all()


def _advise(arena: RangeFile, extent: FileRange, advice: int) -> None:
    if extent.holders:
        os.posix_fadvise(arena.file, extent.start, extent.room, advice)


def _sync(arena: RangeFile, extent: FileRange) -> None:
    if not hasattr(LIBC, "sync_file_range"):
        os.fdatasync(arena.file)
    elif LIBC.sync_file_range(arena.file, extent.start, extent.room, _WRITE_AND_WAIT):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
