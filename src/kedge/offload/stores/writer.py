"""The memory window of the file: one thread writes ranges out, another reads them ahead.

# Note [When the bytes are taken]
A program may change a tensor in place right after it was saved, also in ways that increase no
version (``.data``). A background write from the tensor's memory could mix old and new bytes, and
the saved ones would be lost. So `RangeFile.put` copies them to the system before it returns, with
one `pwritev`, and only the way from the system's memory to the disk is in the background. Reads of
ranges not yet written out come from the same memory, and a slot that is freed first is never
written. Only the bytes of the window stay in the system's memory for longer.

# Note [Why no RWF_DONTCACHE]
A write with this flag (Linux 6.14) drops only pages that it brought into memory itself. The thread
finds the pages of its range in memory, so it would copy them once more and drop none: of 310 MB on
ext4 all stayed, instead of 105 now. In `RangeFile.put` the flag would drop the window too, which is
read first, and write ranges that are freed first: puts took half as long and gets a third longer,
both together the same within the noise (medians of 15: 0.42 s and 0.49 s).
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
_LOOK_BACK = 64  # the number of earlier ranges that a read considers for reading ahead

if hasattr(LIBC, "sync_file_range"):
    LIBC.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class JobThread:
    """A thread that runs jobs in order; it starts with the first job, and ends at `end` or when its object is collected."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changing = threading.Lock()

    def do(self, job: _Job) -> None:
        """Queue a job behind those before it."""
        with self._changing:  # or two concurrent first calls would start a thread each
            if self._thread is None or not self._thread.is_alive():
                # It holds only the queue, so that a store that is never closed can still be
                # collected.
                self._thread = threading.Thread(
                    target=_work, args=(self._jobs,), name=self._name, daemon=True
                )
                self._thread.start()
            self._jobs.put(job)

    def end(self) -> None:
        """Run the queued jobs, and end the thread."""
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
        del job  # or it would hold the ranges while the thread waits


class SummedRanges:
    """Ranges by their numbers, and so in the order of puts.

    Attributes:
        room: The sum of their rooms, in bytes.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, FileRange] = {}
        self.room = 0

    def __contains__(self, extent: FileRange) -> bool:
        return extent.number in self._ranges

    def add(self, extent: FileRange) -> None:
        """Add a range."""
        self._ranges[extent.number] = extent
        self.room += extent.room

    def remove(self, extent: FileRange) -> None:
        """Remove a range, if present."""
        if self._ranges.pop(extent.number, None):
            self.room -= extent.room

    def pop_oldest(self) -> FileRange:
        """Remove the range that was put first, and return it."""
        extent = self._ranges[next(iter(self._ranges))]
        self.remove(extent)
        return extent


class MemoryWindow:
    """The bound on the file's bytes in memory.

    Args:
        limit: The bytes that may stay in memory; as many again may be on their way out, and as many
            on their way in.

    Attributes:
        out: Bytes written out so far.
        failed: The disk's error in writing some of them, until the next put raises it.
    """

    def __init__(self, limit: int) -> None:
        self.out = 0
        self.failed: OSError | None = None
        self._limit = limit
        self._known: dict[int, FileRange] = {}  # by number, and so in the order of puts
        self._inside = SummedRanges()  # those of them that stay in memory
        self._ahead = SummedRanges()  # those read ahead and not yet read
        self._leaving = 0
        self._ended = False
        self._left = threading.Condition()
        self._writer = JobThread("kedge-writes-out")
        self._reader = JobThread("kedge-reads-ahead")

    def add(self, extent: FileRange) -> None:
        """Add a new range; called under the file's lock."""
        self._known[extent.number] = extent
        self._inside.add(extent)

    def forget(self, extent: FileRange) -> None:
        """Forget a freed range, which need not be written any more; called under the file's lock."""
        self._known.pop(extent.number, None)
        self._inside.remove(extent)
        self._ahead.remove(extent)

    def squeeze(self, ranges: RangeFile) -> None:
        """Write out the oldest ranges until the rest is within the limit; waits if the disk is behind."""
        with ranges.locked():
            leaving = []
            while self._inside.room > self._limit:
                leaving.append(self._inside.pop_oldest())
        with self._left:
            self._leaving += sum(extent.room for extent in leaving)
        for extent in leaving:
            self._writer.do(partial(self._write_out, ranges, extent))
        with self._left:
            self._left.wait_for(lambda: self._leaving <= self._limit)

    def read_ahead(self, ranges: RangeFile, extent: FileRange) -> None:
        """Read ahead the ranges put before one that is being read: they are read next."""
        with ranges.locked():
            self._ahead.remove(extent)
            before = map(
                self._known.get, range(extent.number - 1, extent.number - 1 - _LOOK_BACK, -1)
            )
            wanted = [found for found in before if found is not None and self._fetch(found)]
        self._bring(ranges, wanted)

    def prefetch(self, ranges: RangeFile, extent: FileRange) -> None:
        """Read ahead a range that will be read."""
        with ranges.locked():
            wanted = [extent] if self._fetch(extent) else []
        self._bring(ranges, wanted)

    def end(self) -> None:
        """End both threads; ranges not yet written out stay in memory."""
        self._ended = True
        self._writer.end()
        self._reader.end()

    def _fetch(self, extent: FileRange) -> bool:
        """Whether a range is out and there is room to read it ahead; if so, it counts as read ahead from now on."""
        if not extent.out or extent in self._ahead or self._ahead.room + extent.room > self._limit:
            return False
        self._ahead.add(extent)
        return True

    def _bring(self, ranges: RangeFile, wanted: list[FileRange]) -> None:
        for extent in wanted:
            self._reader.do(partial(_advise, ranges, extent, os.POSIX_FADV_WILLNEED))

    def _write_out(self, ranges: RangeFile, extent: FileRange) -> None:
        try:
            if extent.holders and not self._ended:
                _sync(ranges, extent)
                extent.out = True
                self.out += extent.room
                _advise(ranges, extent, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            # The system still has the bytes in memory, where they stay; the next put raises.
            self.failed = error
        finally:
            with self._left:
                self._leaving -= extent.room
                self._left.notify_all()


def _advise(ranges: RangeFile, extent: FileRange, advice: int) -> None:
    if extent.holders:
        ranges.file.advise(extent, advice)


def _sync(ranges: RangeFile, extent: FileRange) -> None:
    if not hasattr(LIBC, "sync_file_range"):
        os.fdatasync(ranges.file.descriptor)
    elif LIBC.sync_file_range(ranges.file.descriptor, extent.start, extent.room, _WRITE_AND_WAIT):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
