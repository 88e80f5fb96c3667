"""The CPU store: saved tensors of a device, moved to host memory.

# Note [Bytes of now]
A copy out runs some time after `put` has returned. If the program changes the tensor in place
before the copy is done, the slot may hold the old bytes, the new ones or a mixture. The version
counter, which `put` receives with the bytes, reveals such a change: the slot then raises the error
that autograd raises for a changed saved tensor.

# Note [Read ahead]
Backward reads saved tensors in about the reverse order, and in the same order in each step. So each
slot has a number within its step, and the store remembers from the step before which number
followed which; where it does not know that yet, it expects the preceding number. While the window
has room, the store copies the slots that come next. It goes on where it stopped at the read before:
a slot whose source is still held is passed over, and copied when it has arrived in host memory.

# Note [The window]
A program runs ahead of its device, so all that may be on its way is held: the sources of copies
out, and what is read ahead. At 512 MB each way, a model that saves less than that would save no
memory. So the window is a quarter of what a step puts: of the last step, or of what this one has
put so far, if that is more. Waiting for the rest takes at most as long as to copy 512 MB each way,
and a step that puts 2 GB has the whole window.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.errors import NothingGained, warn
from kedge.files.pressure import Pressure
from kedge.offload.stores.pinned import PinnedRange, PinnedRanges
from kedge.offload.stores.streams import CopyDevice
from kedge.torch_internals.tensors import version_of

WINDOW = 512 << 20
"""The bytes that may be on their way out, and as many that are on their way in ahead of need."""
_LEAST = 16 << 20
"""The least bytes of the window."""
_PART = 4
"""The part of the bytes of a step that the window has; see Note [The window]."""
_SHARE = 0.8  # of the free memory: the share that Kedge may take


class ReadOrder:
    """The order of reads: the number that follows each number; see Note [Read ahead]."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._last: int | None = None
        # The number that is expected next, and the last one of those from there on that were looked
        # at.
        self._next: int | None = None
        self._front: int | None = None

    def asked(self, number: int) -> int:
        """Record that a number was read; returns the last of those after it that were looked at."""
        before = self._last
        if before is not None and before != number:
            self._seen[before] = number
        self._last = number
        front = self._front
        if front is None or front == before or number != self._next:
            front = number
        self._front = front
        self._next = next(self.after(number), None)
        return front

    def looked_at(self, number: int) -> None:
        """Record that nothing is left to do ahead for a number, and all that are expected before it."""
        self._front = number

    def ended(self) -> None:
        """End a step: its order is the order expected in the next one."""
        if self._seen:
            self._known = self._seen
        self._seen = {}
        self._last = None
        self._front = None

    def after(self, number: int) -> Iterator[int]:
        """The numbers expected next, each once."""
        passed = {number}
        while True:
            number = self._known.get(number, number - 1)
            if number < 0 or number in passed:
                return
            passed.add(number)
            yield number


class LoadedBytes(NamedTuple):
    """Bytes that are back on the device, or on their way there.

    Attributes:
        target: The bytes.
        arrived: The event after which they are complete.
        stream: The stream that the memory was allocated on.
    """

    target: Tensor
    arrived: Any
    stream: Any


class CpuSlot:
    """Bytes of a device in host memory.

    Attributes:
        nbytes: The number of bytes.
        number: The number of slots that its step had before it.
        place: The host memory that holds them.
        device: The device that they came from.
        written: The event after which the copy out is complete.
        source: The device bytes that are copied, until that copy is known to be done; then None.
        stream: The stream that the source was computed on.
        version: The version of the source when it was put.
        torn: Whether the source changed before its copy was done.
        last: The event after which all copies from and to the place are complete.
        loaded: The bytes that were read ahead, if any.
    """

    __slots__ = (
        "device",
        "last",
        "loaded",
        "nbytes",
        "number",
        "place",
        "source",
        "store",
        "stream",
        "torn",
        "version",
        "written",
    )

    def __init__(self, store: CpuStore, source: Tensor, place: PinnedRange, number: int) -> None:
        self.store = store
        self.place = place
        self.number = number
        self.source: Tensor | None = source
        self.nbytes = source.numel()
        self.device = source.device
        self.version = version_of(source)
        self.stream: Any = None
        self.written: Any = None
        self.last: Any = None
        self.loaded: LoadedBytes | None = None
        self.torn = False

    def get(self) -> Tensor:
        """Return the bytes, on the device that they came from.

        Raises:
            RuntimeError: The program changed them in place before they were copied.
        """
        return self.store.fetch(self)

    def prefetch(self) -> None:
        """Start the copy back now, if the window has room."""
        self.store.prefetch(self)

    def free(self) -> None:
        """Release the place."""
        self.store.release(self)


class CopyWindow:
    """The bytes that may be on their way, each way; see Note [The window].

    Args:
        most: The most bytes.
        fixed: Whether it is always these.

    Attributes:
        most: The most bytes.
    """

    def __init__(self, most: int, *, fixed: bool) -> None:
        self.most = most
        self._fixed = fixed
        self._last = 0
        self._put = 0

    @property
    def nbytes(self) -> int:
        """The bytes that may be on their way now."""
        if self._fixed:
            return self.most
        share = max(self._last, self._put) // _PART
        return min(self.most, max(_LEAST, share))

    def put(self, nbytes: int) -> None:
        """Count bytes that are put."""
        self._put += nbytes

    def step_ended(self) -> None:
        """End a step."""
        self._last = self._put
        self._put = 0


class CopiesOut:
    """The copies to host memory that may not be done yet, with the sources held for them.

    Args:
        device: The device interface that copies.
        window: The bytes that may be on their way.
        landed: Called with each slot whose copy is done.
    """

    def __init__(
        self, device: CopyDevice, window: CopyWindow, landed: Callable[[CpuSlot], None]
    ) -> None:
        self._device = device
        self._window = window
        self._landed = landed
        self._slots: deque[CpuSlot] = deque()
        self._nbytes = 0

    def begin(self, slot: CpuSlot, data: Tensor) -> None:
        """Start to copy bytes to a slot's place."""
        device = self._device
        # Before the copy stream is entered: Note [Order of copies]
        stream = slot.stream = device.current(data.device)
        out = device.own(data.device, "out")
        for event in (device.mark(stream), *slot.place.busy):
            device.after(out, event)
        device.copy(slot.place.host, data, out)
        slot.written = slot.last = device.mark(out)
        self._slots.append(slot)
        self._nbytes += slot.nbytes

    def settle(self) -> None:
        """Drop the sources of finished copies."""
        while self._slots and self._device.reached(self._slots[0].written):
            self._drop_source()

    def wait(self) -> None:
        """Wait while more bytes than the window allows are on their way."""
        while self._nbytes > self._window.nbytes:
            self._device.wait(self._slots[0].written)
            self._drop_source()

    def finish(self) -> None:
        """Wait for all copies."""
        while self._slots:
            self._device.wait(self._slots[0].written)
            self._drop_source()

    def _drop_source(self) -> None:
        """Drop the source of the first copy, which is done."""
        slot = self._slots.popleft()
        self._nbytes -= slot.nbytes
        # See Note [Bytes of now].
        slot.torn = slot.source is not None and version_of(slot.source) != slot.version
        slot.source = None
        self._landed(slot)


class CopiesIn:
    """The copies back to the devices, on demand and ahead of demand; see Note [Read ahead].

    Args:
        device: The device interface that copies.
        window: The bytes that may be read ahead.
    """

    def __init__(self, device: CopyDevice, window: CopyWindow) -> None:
        self._device = device
        self._window = window
        self._most = window.most
        self._order = ReadOrder()
        self._ahead = 0  # bytes read ahead and not yet requested
        # Slots that were passed over, as their sources were held.
        self._passed: set[CpuSlot] = set()
        # Read ahead in vain, and perhaps still being written to.
        self._retired: list[LoadedBytes] = []

    def step_ended(self) -> None:
        """End a step: its order is the order expected in the next one."""
        self._order.ended()
        self._passed.clear()

    def get(self, slot: CpuSlot, stream: Any) -> Tensor:
        """Return a slot's bytes, read ahead or read now; the stream waits for their arrival."""
        device = self._device
        found = slot.loaded
        if found is None:
            found = self._load(slot, stream)
        elif found.stream == stream or device.lend(found.target, stream):
            slot.loaded = None
            self._ahead -= slot.nbytes
        else:  # its memory is that of another stream, and cannot be kept for this one
            self.forget(slot)
            found = self._load(slot, stream)
        device.after(stream, found.arrived)
        return found.target

    def follow(self, slot: CpuSlot, stream: Any, alive: Mapping[int, CpuSlot]) -> None:
        """Read ahead what is expected after a slot that a stream reads; see Note [Read ahead]."""
        order = self._order
        self._passed.discard(slot)
        for number in order.after(order.asked(slot.number)):
            following = alive.get(number)
            if following is not None and following.device == slot.device:
                if following.source is not None:
                    self._passed.add(following)
                elif not self.prefetch(following, stream):
                    return
            order.looked_at(number)

    def landed(self, slot: CpuSlot) -> None:
        """Read a slot ahead that was passed over, and has arrived in host memory."""
        if slot in self._passed:
            self._passed.discard(slot)
            self.prefetch(slot, self._device.current(slot.device))

    def prefetch(self, slot: CpuSlot, stream: Any) -> bool:
        """Start to copy a slot's bytes back for a stream.

        Returns:
            False if the window or the device has no room.
        """
        if slot.loaded is not None or slot.source is not None or slot.torn:
            return True
        room = min(self._most, self._window.nbytes)
        if room:
            room = max(room, slot.nbytes)
        if self._ahead + slot.nbytes > room:
            return False
        try:
            slot.loaded = self._load(slot, stream)
        except torch.OutOfMemoryError:
            # Bytes that are not needed yet must not end the program.
            self._most = self._ahead
            return False
        self._ahead += slot.nbytes
        return True

    def forget(self, slot: CpuSlot) -> None:
        """Drop the bytes that were read ahead for a freed slot."""
        self._passed.discard(slot)
        if slot.loaded is not None:
            self._retired.append(slot.loaded)
            self._ahead -= slot.nbytes
            slot.loaded = None

    def settle(self) -> None:
        """Drop the bytes that were read ahead in vain and have arrived."""
        self._retired = [each for each in self._retired if not self._device.reached(each.arrived)]

    def finish(self) -> None:
        """Wait for the bytes that were read ahead in vain, and drop them."""
        for each in self._retired:
            self._device.wait(each.arrived)
        self._retired = []

    def _load(self, slot: CpuSlot, stream: Any) -> LoadedBytes:
        device = self._device
        target = device.room(slot.nbytes, slot.device)
        allocated = device.mark(stream)
        into = device.own(slot.device, "in")
        device.after(into, allocated)
        device.after(into, slot.written)
        device.copy(target, slot.place.host, into)
        # Copies back run one after the other, and behind the copy out.
        arrived = slot.last = device.mark(into)
        return LoadedBytes(target, arrived, stream)


class CpuStore:
    """The store that moves bytes between devices and host memory, beside the computation.

    Args:
        pin: Whether to lock the memory's pages.
        most: The bytes of host memory that the store may take; None: four fifths of the free
            memory.
        window: The bytes that may be on their way, each way, always; None: at most 512 MB; see Note
            [The window].
        device: The device interface that copies; None: that of every device with streams.
    """

    name = "cpu"

    def __init__(
        self,
        *,
        pin: bool = True,
        most: int | None = None,
        window: int | None = None,
        device: CopyDevice | None = None,
    ) -> None:
        self._device = CopyDevice() if device is None else device
        if most is None:
            free = Pressure().room()
            most = sys.maxsize if free is None else int(free * _SHARE)
        self._memory = PinnedRanges(self._device, pin=pin, most=most)
        if window is None:
            self._window = CopyWindow(WINDOW, fixed=False)
        else:
            self._window = CopyWindow(window, fixed=True)
        self._in = CopiesIn(self._device, self._window)
        self._out = CopiesOut(self._device, self._window, self._in.landed)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._takes: dict[torch.device, bool] = {}
        self._alive: dict[int, CpuSlot] = {}
        self._number = 0
        self._freed: deque[CpuSlot] = deque()
        self._closed = False

    @property
    def pinned(self) -> int:
        """The bytes of host memory that the store has taken."""
        return self._memory.size

    @property
    def window(self) -> int:
        """The most bytes that may be on their way, each way."""
        return self._window.most

    def takes(self, device: torch.device) -> bool:
        """Whether moving bytes from this device frees memory there; if not, warns once."""
        known = self._takes.get(device)
        if known is None:
            reason = self._device.gains(device)
            known = self._takes[device] = reason is None
            if reason is not None:
                _warn(reason)
        return known

    def put(self, data: Tensor) -> CpuSlot:
        """Copy bytes to host memory, after all work queued on the current stream so far.

        Raises:
            OSError: There is no room, or no copy can run now (closed store, capture of a graph).
        """
        with self._lock:
            if self._closed:
                raise OSError(errno.EBUSY, "the store is closed")
            if not self._settle():
                raise OSError(errno.EBUSY, "a graph is being captured, which moves nothing")
            if not self._alive:
                self._number = 0
                self._in.step_ended()
                self._window.step_ended()

            slot = CpuSlot(self, data, self._memory.take(data.numel()), self._number)
            self._out.begin(slot, data)
            self._alive[slot.number] = slot
            self._number += 1
            self._window.put(slot.nbytes)
            self._out.wait()
        return slot

    def fetch(self, slot: CpuSlot) -> Tensor:
        """Return a slot's bytes on its device.

        Work queued on the current stream from now on waits for them.
        """
        with self._lock:
            self._settle()
            _check(slot)
            stream = self._device.current(slot.device)
            target = self._from_source(slot, stream)
            if target is None:
                target = self._in.get(slot, stream)
            self._in.follow(slot, stream, self._alive)
        return target

    def prefetch(self, slot: CpuSlot) -> None:
        """Start to copy a slot's bytes back, if the window has room."""
        if slot.loaded is not None or slot.source is not None:
            return
        with self._lock:
            self._settle()
            self._in.prefetch(slot, self._device.current(slot.device))

    def release(self, slot: CpuSlot) -> None:
        """Release a slot's place, at the next call of a method at the latest.

        Callable at any moment, also by the garbage collector.
        """
        # The process frees its memory at exit; a child has copies of the slots, and no device.
        if sys.is_finalizing() or os.getpid() != self._process:
            return
        self._freed.append(slot)
        if slot.loaded is None and slot.source is None and not self._closed:
            return  # it holds nothing of the device's
        # If a method of this store is active, in this thread or another one, the next method call
        # does it.
        settled = True
        while settled and self._freed and self._lock.acquire(blocking=False):
            try:
                settled = self._settle()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Return the memory to the system as soon as no slot needs it."""
        with self._lock:
            self._closed = True
            self._settle()

    def _settle(self) -> bool:
        """Drop what was held for finished copies.

        Returns:
            False while a graph is captured, which to ask an event would make invalid.
        """
        if self._device.capturing():
            return False
        self._out.settle()
        while self._freed:
            self._forget(self._freed.popleft())
        self._in.settle()
        if self._closed and not self._alive:
            self._out.finish()
            self._in.finish()
            self._memory.close()
        return True

    def _forget(self, slot: CpuSlot) -> None:
        del self._alive[slot.number]
        self._in.forget(slot)
        self._memory.release(slot.place, slot.last)

    def _from_source(self, slot: CpuSlot, stream: Any) -> Tensor | None:
        """Copy on the device itself if the source is still held.

        Returns:
            None if it is not, or if another stream computed it.
        """
        if slot.source is None or slot.stream != stream:
            return None
        target = self._device.room(slot.nbytes, slot.device)
        self._device.copy(target, slot.source, stream)
        return target


def _check(slot: CpuSlot) -> None:
    """Raise RuntimeError if the source of a slot changed before its copy was done; see Note [Bytes of now]."""
    changed = slot.torn
    if slot.source is not None:
        changed = changed or version_of(slot.source) != slot.version
    if not changed:
        return
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified "
        f"by an inplace operation: {slot.nbytes:,} bytes on {slot.device} "
        f"were moved to the CPU's memory at version {slot.version}, "
        "and the program changed them before the copy was done. "
        "Hint: avoid the in-place operation, or keep that module's saved tensors: "
        "kedge.offload(..., where=...)"
    )


def _warn(reason: str) -> None:
    warn(
        NothingGained(
            f"to=kedge.Cpu() moves nothing: {reason}; they stay in memory, "
            "except those that can be rebuilt exactly. kedge.Disk() moves them to a file; "
            "kedge.Rebuild() only rebuilds, without this warning"
        )
    )
