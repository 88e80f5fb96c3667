"""Pinned host memory for copies: a few large blocks of locked pages, handed out in ranges.

PyTorch's own allocator of pinned memory rounds each block up to a power of two, and so takes up to
twice the requested bytes of a memory that nothing else can use then.
"""

from __future__ import annotations

import errno
import mmap
import sys
from bisect import bisect_left, insort
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kedge.errors import NotPinned, warn
from kedge.offload.stores.streams import CopyDevice

_GRAIN = 512  # bytes; each range begins at a multiple of it
_LEAST = 64 << 20
_MOST = 1 << 30
"""The bytes by which memory grows, at least and at most."""


class PinnedRange:
    """A range of host memory.

    Attributes:
        host: The bytes.
        busy: Events of earlier copies from and to these bytes that may not be done; a write to them
            has to wait for these.
    """

    __slots__ = ("block", "busy", "host", "size", "start")

    def __init__(self, block: _Block, start: int, nbytes: int) -> None:
        self.block = block
        self.start = start
        self.size = _rounded(nbytes)
        self.host = block.host[start : start + nbytes]
        self.busy: list[Any] = []


class PinnedRanges:
    """Host memory that grows by large blocks, up to a limit, and is handed out in ranges.

    Args:
        device: The device interface that locks the pages.
        pin: Whether to lock them.
        most: The bytes that it may take from the system.

    Attributes:
        size: The bytes that it has taken from the system.
    """

    def __init__(self, device: CopyDevice, *, pin: bool, most: int) -> None:
        self._device = device
        self._pin = pin
        self._most = most
        self._blocks: list[_Block] = []
        self.size = 0

    @property
    def used(self) -> int:
        """The bytes that are handed out."""
        return sum(block.free.used for block in self._blocks)

    def take(self, nbytes: int) -> PinnedRange:
        """Return a range of so many bytes.

        Raises:
            OSError: The limit would be exceeded, or the system has no memory left.
        """
        for block in self._blocks:
            start = block.free.take(_rounded(nbytes))
            if start is not None:
                break
        else:
            block = self._grow(nbytes)
            start = block.free.take(_rounded(nbytes))
            assert start is not None  # noqa: S101 - it was made large enough
        taken = PinnedRange(block, start, nbytes)
        for event in block.busy.take(start, start + taken.size):
            if not self._device.reached(event):
                taken.busy.append(event)
        return taken

    def release(self, taken: PinnedRange, last: Any) -> None:
        """Take a range back.

        Args:
            taken: The range.
            last: The event behind all copies from and to it, for which the next copy to it waits;
                None if there were none.
        """
        block = taken.block
        start = taken.start
        block.free.release(start, taken.size)
        if last is not None:
            block.busy.add(start, start + taken.size, last)

    def close(self) -> None:
        """Return all memory to the system; waits for the copies from and to it."""
        for block in self._blocks:
            for event in block.busy.events():
                self._device.wait(event)
            if block.pinned:
                self._device.unpin(block.host.data_ptr())
        self._blocks = []
        self.size = 0

    def _grow(self, nbytes: int) -> _Block:
        size = _paged(max(_rounded(nbytes), min(max(_LEAST, self.size), _MOST)))
        if self.size + size > self._most:
            size = _paged(_rounded(nbytes))
        if self.size + size > self._most:
            raise OSError(
                errno.ENOMEM,
                f"saved tensors need {nbytes:,} more bytes of the CPU's memory; "
                f"{self.size:,} are in use and the limit is {self._most:,}",
            )

        locked = self._device.locked(size) if self._pin else None
        block = _Block(size, locked)
        if self._pin and block.own:
            failed = self._device.pin(block.host.data_ptr(), size)
            block.pinned = failed is None
            if failed is not None:
                _warn(failed, size)
        self._blocks.append(block)
        self.size += size
        return block


class FreeRanges:
    """The free ranges of a block of memory: best fit, and neighbours joined.

    Training steps take the same sizes again and again, so the smallest range that is large enough
    mostly has exactly that size, and memory stops growing after the first step.

    Args:
        size: The bytes of the block.

    Attributes:
        used: The bytes that are taken.
    """

    def __init__(self, size: int) -> None:
        self.used = 0
        self._sizes: list[tuple[int, int]] = []  # (size, start), sorted
        self._starts: dict[int, int] = {}  # start -> size
        self._ends: dict[int, int] = {}  # end -> start
        self._insert(0, size)

    def take(self, size: int) -> int | None:
        """Take a range; returns its start, or None if no free range is large enough."""
        place = bisect_left(self._sizes, (size, 0))
        if place == len(self._sizes):
            return None
        found, start = self._sizes[place]
        self._remove(start)
        if found > size:
            self._insert(start + size, found - size)
        self.used += size
        return start

    def release(self, start: int, size: int) -> None:
        """Release a range that was taken, and join it with the free ranges beside it."""
        self.used -= size
        before = self._ends.get(start)
        if before is not None:
            size += self._remove(before)
            start = before
        if start + size in self._starts:
            size += self._remove(start + size)
        self._insert(start, size)

    def _insert(self, start: int, size: int) -> None:
        insort(self._sizes, (size, start))
        self._starts[start] = size
        self._ends[start + size] = start

    def _remove(self, start: int) -> int:
        size = self._starts.pop(start)
        del self._ends[start + size]
        del self._sizes[bisect_left(self._sizes, (size, start))]
        return size


class BusyRanges:
    """The ranges of a block that copies may still work on, after they were taken back.

    They do not overlap: a range is taken with the events of what lay there before.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []  # sorted
        self._ranges: dict[int, tuple[int, Any]] = {}  # start -> (end, event)

    def add(self, start: int, end: int, event: Any) -> None:
        """Record the event behind all copies from and to a range."""
        insort(self._starts, start)
        self._ranges[start] = end, event

    def take(self, start: int, end: int) -> list[Any]:
        """Forget the part of the ranges that lies in the given one; returns their events."""
        first = bisect_left(self._starts, start)
        if first > 0 and self._ranges[self._starts[first - 1]][0] > start:
            first -= 1
        behind = bisect_left(self._starts, end)
        events = []
        outside = []
        for begun in self._starts[first:behind]:
            ended, event = self._ranges.pop(begun)
            events.append(event)
            for left, right in ((begun, start), (end, ended)):
                if left < right:
                    outside.append(left)
                    self._ranges[left] = right, event
        self._starts[first:behind] = outside
        return events

    def events(self) -> list[Any]:
        """Return the events of all ranges."""
        return [event for _, event in self._ranges.values()]


class _Block:
    """One mapping of memory from the system.

    Attributes:
        host: Its bytes.
        free: Its free ranges.
        busy: Its ranges that were taken back, and that copies may still work on.
        own: Whether it is a mapping, and not memory that PyTorch has locked.
        pinned: Whether the pages of a mapping are locked.
    """

    __slots__ = ("busy", "free", "host", "own", "pinned")

    def __init__(self, size: int, given: Tensor | None) -> None:
        self.own = given is None
        if given is None:
            given = torch.frombuffer(_map(size), dtype=torch.uint8)
        self.host = given
        self.free = FreeRanges(size)
        self.busy = BusyRanges()
        self.pinned = False


def _map(size: int) -> mmap.mmap:
    """Return memory from the system; each page is placed near the thread that first touches it."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A child process must not share pages that a device writes to: the first write would move the
    # parent's.
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _rounded(nbytes: int) -> int:
    return max(-(-nbytes // _GRAIN) * _GRAIN, _GRAIN)


def _paged(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _warn(failed: str, size: int) -> None:
    warn(
        NotPinned(
            f"{size:,} bytes of the CPU's memory could not be locked ({failed}): "
            "copies to and from it stop the program; "
            "a limit of the container or `ulimit -l` may be the cause; "
            "kedge.Cpu(pin=False) locks no memory"
        )
    )
