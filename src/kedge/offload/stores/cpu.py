"""The host's memory as a place for what a device saved.

# Note [Bytes of now]
A copy out runs some time after `put` has returned. If the program changes the tensor in place before it is done, it is
not known which bytes were copied. The version counter, which `put` is given with the bytes, shows that it
happened: then the slot has nothing to return, and raises the error that autograd raises for a changed saved tensor.

# Note [Read ahead]
Backward asks for what was saved in about the reverse order, and in the same order in each step. So each slot is known
by its number within the step, and which number was asked for after which is remembered from the step before; where that
is not known yet, it is the number before. While there is room in the window, the slots that come next are on their way.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.errors import NothingGained, warn
from kedge.offload.stores.pinned import PinnedRange, PinnedRanges
from kedge.offload.stores.pressure import Pressure
from kedge.offload.stores.streams import Cuda
from kedge.torch_internals.tensors import version_of

WINDOW = 512 << 20
"""How many bytes may be on their way out, and how many on their way in, before they are needed."""
_SHARE = 0.8  # of the memory that is free, for ours


class ReadOrder:
    """Which number is asked for after which; see Note [Read ahead]."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._last: int | None = None

    def asked(self, number: int) -> None:
        """Note that a number was asked for."""
        if self._last is not None and self._last != number:
            self._seen[self._last] = number
        self._last = number

    def ended(self) -> None:
        """End a step: what was asked for in it is what is expected in the next one."""
        if self._seen:
            self._known = self._seen
        self._seen, self._last = {}, None

    def after(self, number: int) -> Iterator[int]:
        """Yield the numbers that are expected next, each once."""
        met = {number}
        while (number := self._known.get(number, number - 1)) >= 0 and number not in met:
            met.add(number)
            yield number


class LoadedBytes(NamedTuple):
    """Bytes that are back on the device, or on their way.

    Attributes:
        target: The bytes.
        arrived: The event after which they are there.
        stream: The stream that the memory was allocated on.
    """

    target: Tensor
    arrived: Any
    stream: Any


class CpuSlot:
    """Bytes of a device in the host's memory.

    Attributes:
        nbytes: How many.
        number: How many slots its step had before it.
        place: Where they are.
        device: Where they came from.
        written: The event after which they are there.
        source: Where they are copied from, until that is known to be done.
        stream: The stream that the source was computed on.
        version: The version of the source at the time it was put.
        torn: Whether the source was changed while it was copied.
        read: The events of copies from the place.
        loaded: What was read ahead.
    """

    __slots__ = (
        "device", "loaded", "nbytes", "number", "place", "read", "source", "store", "stream", "torn", "version",
        "written",
    )  # fmt: skip

    def __init__(self, store: CpuStore, source: Tensor, place: PinnedRange, number: int) -> None:
        self.store, self.place, self.number = store, place, number
        self.source: Tensor | None = source
        self.nbytes, self.device, self.version = source.numel(), source.device, version_of(source)
        self.stream: Any = None
        self.written: Any = None
        self.read: list[Any] = []
        self.loaded: LoadedBytes | None = None
        self.torn = False

    def get(self) -> Tensor:
        """Return the bytes, on the device that they came from.

        Raises:
            RuntimeError: They were changed in place before they could be copied.
        """
        return self.store.fetch(self)

    def prefetch(self) -> None:
        """Bring the bytes back now, if there is room in the window."""
        self.store.prefetch(self)

    def free(self) -> None:
        """Release the place."""
        self.store.release(self)


class CopiesOut:
    """The copies to the host's memory that may not be done, and what is held for them.

    Args:
        device: What is asked to copy.
        window: How many bytes may be on their way.
    """

    def __init__(self, device: Cuda, window: int) -> None:
        self._device, self._window = device, window
        self._slots: deque[CpuSlot] = deque()
        self._nbytes = 0

    def begin(self, slot: CpuSlot, data: Tensor) -> None:
        """Copy bytes to a slot's place."""
        device = self._device
        # Before the stream for copies is entered: Note [Who waits for whom]
        stream = slot.stream = device.current(data.device)
        out = device.own(data.device, "out")
        for event in (device.mark(stream), *slot.place.busy):
            device.after(out, event)
        device.copy(slot.place.host, data, out)
        slot.written = device.mark(out)
        self._slots.append(slot)
        self._nbytes += slot.nbytes

    def settle(self) -> None:
        """Let go of the sources of what is copied."""
        while self._slots and self._device.reached(self._slots[0].written):
            self._landed()

    def wait(self) -> None:
        """Wait as long as more bytes than the window has are on their way."""
        while self._nbytes > self._window:
            self._device.wait(self._slots[0].written)
            self._landed()

    def finish(self) -> None:
        """Wait for all."""
        while self._slots:
            self._device.wait(self._slots[0].written)
            self._landed()

    def _landed(self) -> None:
        slot = self._slots.popleft()
        self._nbytes -= slot.nbytes
        # See Note [Bytes of now].
        slot.torn = slot.source is not None and version_of(slot.source) != slot.version
        slot.source = None


class CopiesIn:
    """The copies back to the devices, when they are asked for and ahead of that; see Note [Read ahead].

    Args:
        device: What is asked to copy.
        window: How many bytes may be read ahead.
    """

    def __init__(self, device: Cuda, window: int) -> None:
        self._device, self._most = device, window
        self._order = ReadOrder()
        self._ahead = 0  # bytes read ahead and not asked for
        self._retired: list[LoadedBytes] = []  # read ahead for nothing, and perhaps still being written to

    def step_ended(self) -> None:
        """Expect in the next step the order of this one."""
        self._order.ended()

    def get(self, slot: CpuSlot, stream: Any) -> Tensor:
        """Return what was read ahead, or is read now; a stream waits for it."""
        found, slot.loaded = slot.loaded, None
        if found is None:
            found = self._load(slot)
        else:
            self._ahead -= slot.nbytes
        self._device.after(stream, found.arrived)
        if found.stream != stream:
            self._device.lend(found.target, stream)
        return found.target

    def follow(self, slot: CpuSlot, alive: Mapping[int, CpuSlot]) -> None:
        """Read ahead what is expected after a slot that was asked for."""
        self._order.asked(slot.number)
        for number in self._order.after(slot.number):
            following = alive.get(number)
            if following is not None and following.device == slot.device and not self.prefetch(following):
                return

    def prefetch(self, slot: CpuSlot) -> bool:
        """Bring a slot's bytes back; False if there is no room in the window, or none on the device."""
        if slot.loaded is not None or slot.source is not None or slot.torn:
            return True
        if self._ahead + slot.nbytes > max(self._most, slot.nbytes if self._most else 0):
            return False
        try:
            slot.loaded = self._load(slot)
        except torch.OutOfMemoryError:
            # What is not needed yet must not be what ends the program.
            self._most = self._ahead
            return False
        self._ahead += slot.nbytes
        return True

    def forget(self, slot: CpuSlot) -> None:
        """Drop what was read ahead for a slot that is free."""
        if slot.loaded is not None:
            self._retired.append(slot.loaded)
            self._ahead -= slot.nbytes
            slot.loaded = None

    def settle(self) -> None:
        """Let go of what was read ahead for nothing, and has arrived."""
        self._retired = [each for each in self._retired if not self._device.reached(each.arrived)]

    def finish(self) -> None:
        """Wait for what was read ahead for nothing."""
        for each in self._retired:
            self._device.wait(each.arrived)
        self._retired = []

    def _load(self, slot: CpuSlot) -> LoadedBytes:
        device = self._device
        stream = device.current(slot.device)
        target = device.room(slot.nbytes, slot.device)
        allocated = device.mark(stream)
        into = device.own(slot.device, "in")
        device.after(into, allocated)
        device.after(into, slot.written)
        device.copy(target, slot.place.host, into)
        arrived = device.mark(into)
        slot.read = [*(event for event in slot.read if not device.reached(event)), arrived]
        return LoadedBytes(target, arrived, stream)


class CpuStore:
    """Moves bytes of devices to the host's memory and back, beside the computation.

    Args:
        pin: Whether to lock the memory's pages.
        most: How many bytes of the host's memory may be taken; None: four fifths of what is free.
        window: How many bytes may be on their way, each way.
        device: What is asked to copy; None is CUDA.

    Attributes:
        window: How many bytes may be on their way, each way.
    """

    name = "cpu"

    def __init__(
        self, *, pin: bool = True, most: int | None = None, window: int = WINDOW, device: Cuda | None = None
    ) -> None:
        self._device = Cuda() if device is None else device
        free = Pressure().room() if most is None else None
        most = most or (sys.maxsize if free is None else int(free * _SHARE))
        self._memory = PinnedRanges(self._device, pin=pin, most=most)
        self.window = window
        self._out, self._in = CopiesOut(self._device, window), CopiesIn(self._device, window)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._takes: dict[torch.device, bool] = {}
        self._alive: dict[int, CpuSlot] = {}
        self._number = 0
        self._freed: deque[CpuSlot] = deque()
        self._closed = False

    @property
    def pinned(self) -> int:
        """How many bytes of the host's memory are taken."""
        return self._memory.size

    def takes(self, device: torch.device) -> bool:
        """Whether moving bytes from this device frees memory there; where it does not, a warning says so once."""
        known = self._takes.get(device)
        if known is None:
            reason = self._device.gains(device)
            known = self._takes[device] = reason is None
            if reason is not None:
                _warn(reason)
        return known

    def put(self, data: Tensor) -> CpuSlot:
        """Copy bytes to the host's memory, behind what the current stream has been given so far.

        Raises:
            OSError: There is no room, or no copy can run now.
        """
        with self._lock:
            self._settle()
            if self._closed or self._device.capturing():
                why = "the store is closed" if self._closed else "a CUDA graph is being captured, which moves nothing"
                raise OSError(errno.EBUSY, why)
            if not self._alive:
                self._number = 0
                self._in.step_ended()
            slot = CpuSlot(self, data, self._memory.take(data.numel()), self._number)
            self._out.begin(slot, data)
            self._alive[slot.number] = slot
            self._number += 1
            self._out.wait()
        return slot

    def fetch(self, slot: CpuSlot) -> Tensor:
        """Return a slot's bytes on its device; what the current stream is given from now on comes after them."""
        with self._lock:
            self._settle()
            _check(slot)
            stream = self._device.current(slot.device)
            target = self._from_source(slot, stream)
            if target is None:
                target = self._in.get(slot, stream)
            self._in.follow(slot, self._alive)
        return target

    def prefetch(self, slot: CpuSlot) -> None:
        """Bring a slot's bytes back, if there is room in the window."""
        with self._lock:
            self._settle()
            self._in.prefetch(slot)

    def release(self, slot: CpuSlot) -> None:
        """Release a slot's place, when it is safe: this may be called in the middle of anything."""
        if sys.is_finalizing() or os.getpid() != self._process:
            return  # the memory goes with the process; a child has copies of the slots, and no device
        self._freed.append(slot)
        # If a method of this store is under way, in this thread or another one, the next one does it.
        while self._freed and not self._device.capturing() and self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Return the memory to the system as soon as no slot needs it."""
        with self._lock:
            self._closed = True
            self._settle()

    def _settle(self) -> None:
        """Let go of what was held for copies that are done."""
        if self._device.capturing():
            return  # to ask an event would spoil the capture
        self._out.settle()
        while self._freed:
            self._forget(self._freed.popleft())
        self._in.settle()
        if self._closed and not self._alive:
            self._out.finish()
            self._in.finish()
            self._memory.close()

    def _forget(self, slot: CpuSlot) -> None:
        del self._alive[slot.number]
        self._in.forget(slot)
        self._memory.give(slot.place, [slot.written, *slot.read])

    def _from_source(self, slot: CpuSlot, stream: Any) -> Tensor | None:
        """Copy what has not left yet on the device itself; None if it has, or was made on another stream."""
        if slot.source is None or slot.stream != stream:
            return None
        target = self._device.room(slot.nbytes, slot.device)
        self._device.copy(target, slot.source, stream)
        return target


def _check(slot: CpuSlot) -> None:
    """Raise if a slot does not have the bytes that it was given; see Note [Bytes of now]."""
    now = slot.version + 1 if slot.torn else slot.version if slot.source is None else version_of(slot.source)
    if now == slot.version:
        return
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation:"
        f" {slot.nbytes:,} bytes on {slot.device} were moved to the CPU's memory at version {slot.version}, and were changed"
        " before the copy was done. Hint: do without the in-place operation, or keep what that module saves:"
        " kedge.offload(..., where=...)"
    )


def _warn(reason: str) -> None:
    warn(
        NothingGained(
            f"to=kedge.Cpu() moves nothing: {reason}; they are kept, and what can be rebuilt exactly is rebuilt."
            " kedge.Disk() moves them to a file, kedge.Rebuild() asks for no more than this"
        )
    )
