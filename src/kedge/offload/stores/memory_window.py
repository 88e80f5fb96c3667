"""The window: the bytes of the disk store that stay in memory.

One thread writes older ones out, another reads them ahead.

# Note [When the bytes are taken]
A program may change a tensor in place right after it was saved, also in ways that increase no
version (``.data``). A background write from the tensor's memory could mix old and new bytes, and
the saved ones would be lost. So the store copies them to the system before `put` returns, with one
`pwritev`, and only the way from the system's memory to the disk is in the background. Reads of
bytes not yet written out come from the same memory, and a slot that is freed first is never
written. Only the bytes of the window stay in the system's memory for longer.

# Note [Why no RWF_DONTCACHE]
A write with this flag (Linux 6.14) drops only pages that it brought into memory itself. The thread
finds the pages of its piece in memory, so it would copy them once more and drop none: of 310 MB on
ext4 all stayed, instead of 105 now. In `put` the flag would drop the window too, which is read
first, and write pieces that are freed first: puts took half as long and gets a third longer, both
together the same within the noise (medians of 15: 0.42 s and 0.49 s).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

from kedge.offload.stores.unnamed_file import Piece

_Job: TypeAlias = Callable[[], None]
_LOOK_BACK = 64  # the number of earlier pieces that a read considers for reading ahead


class JobThread:
    """A thread that runs jobs in order.

    It starts with the first job, and ends at `end` or when its object is collected.
    """

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
        del job  # or it would hold the pieces while the thread waits


class SummedPieces:
    """Pieces by their numbers, and so in the order of puts.

    Attributes:
        room: The sum of their rooms, in bytes.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, Piece] = {}
        self.room = 0

    def __contains__(self, piece: Piece) -> bool:
        return piece.number in self._pieces

    def add(self, piece: Piece) -> None:
        """Add a piece."""
        self._pieces[piece.number] = piece
        self.room += piece.room

    def remove(self, piece: Piece) -> None:
        """Remove a piece, if present."""
        if self._pieces.pop(piece.number, None):
            self.room -= piece.room

    def pop_oldest(self) -> Piece:
        """Remove the piece that was put first, and return it."""
        piece = self._pieces[next(iter(self._pieces))]
        self.remove(piece)
        return piece


class MemoryWindow:
    """The bound on the store's bytes in memory.

    Args:
        limit: The bytes that may stay in memory; as many again may be on their way out, and as many
            on their way in.

    Attributes:
        out: Bytes written out so far.
        freed: The pieces freed since the window was last used. Any thread may add one at any time,
            also the garbage collector while this thread has the lock.
        failed: The disk's error in writing some of them, until the next put raises it.
    """

    def __init__(self, limit: int) -> None:
        self.out = 0
        self.freed: deque[Piece] = deque()
        self.failed: OSError | None = None
        self._limit = limit
        self._lock = threading.Lock()
        self._known: dict[int, Piece] = {}
        self._inside = SummedPieces()  # those of them that stay in memory
        self._ahead = SummedPieces()  # those read ahead and not yet read
        self._leaving = 0
        self._ended = False
        self._left = threading.Condition()
        self._writer = JobThread("kedge-writes-out")
        self._reader = JobThread("kedge-reads-ahead")

    def add(self, piece: Piece) -> None:
        """Add a new piece, which is in the system's memory."""
        with self._lock:
            self._forget_freed()
            self._known[piece.number] = piece
            self._inside.add(piece)

    def squeeze(self) -> None:
        """Write out the oldest pieces until the rest is within the limit.

        Waits if the disk is behind.
        """
        leaving = []
        with self._lock:
            self._forget_freed()
            while self._inside.room > self._limit:
                leaving.append(self._inside.pop_oldest())

        with self._left:
            self._leaving += sum(piece.room for piece in leaving)
        for piece in leaving:
            self._writer.do(partial(self._write_out, piece))
        with self._left:
            self._left.wait_for(lambda: self._leaving <= self._limit)

    def read_ahead(self, piece: Piece) -> None:
        """Read ahead the pieces put before one that is being read: they are read next."""
        with self._lock:
            self._forget_freed()
            self._ahead.remove(piece)
            for number in range(piece.number - 1, piece.number - 1 - _LOOK_BACK, -1):
                before = self._known.get(number)
                if before is not None:
                    self._fetch(before)

    def prefetch(self, piece: Piece) -> None:
        """Read ahead a piece that will be read."""
        with self._lock:
            self._forget_freed()
            self._fetch(piece)

    def end(self) -> None:
        """End both threads; pieces not yet written out stay in memory."""
        self._ended = True
        self._writer.end()
        self._reader.end()

    def _forget_freed(self) -> None:
        while self.freed:
            piece = self.freed.popleft()
            self._known.pop(piece.number, None)
            self._inside.remove(piece)
            self._ahead.remove(piece)

    def _fetch(self, piece: Piece) -> None:
        """Begin to read a piece ahead, if it is out and there is room for it."""
        ahead = self._ahead
        if piece.out and piece not in ahead and ahead.room + piece.room <= self._limit:
            ahead.add(piece)
            self._reader.do(partial(_read, piece))

    def _write_out(self, piece: Piece) -> None:
        try:
            filling = piece.filling
            if filling is not None and not self._ended:
                filling.file.sync(piece)
                piece.out = True
                self.out += piece.room
                filling.file.advise(piece, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            # The system still has the bytes in memory, where they stay; the next put raises.
            self.failed = error
        finally:
            with self._left:
                self._leaving -= piece.room
                self._left.notify_all()


def _read(piece: Piece) -> None:
    filling = piece.filling
    if filling is not None:
        filling.file.advise(piece, os.POSIX_FADV_WILLNEED)
