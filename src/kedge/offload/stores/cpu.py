"""The host's memory as a place for what a device saved.

# Note [Bytes of now]
A copy out runs some time after `put` has returned. If the program changes the tensor in place before it is done, nobody
can tell which bytes were copied. The version counter, which `put` is given with the bytes, tells that it
happened: then the slot has nothing to give, and says what autograd itself says to who changes a saved tensor.

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
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.errors import NothingGained, warn
from kedge.offload.stores.pinned import PinnedRange, PinnedRanges
from kedge.offload.stores.pressure import Pressure
from kedge.offload.stores.streams import Cuda, Device
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
        """Hear that a number was asked for."""
        if self._last is not None and self._last != number:
            self._seen[self._last] = number
        self._last = number

    def ended(self) -> None:
        """Hear that a step is over: what was asked for in it is what is expected in the next one."""
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
        self.store.expect(self)

    def free(self) -> None:
        """Give the place back."""
        self.store.release(self)


class CpuStore:
    """Moves bytes of devices to the host's memory and back, beside the computation.

    Args:
        pin: Whether to lock the memory's pages.
        most: How many bytes of the host's memory may be taken; None: four fifths of what is free.
        window: How many bytes may be on their way, each way.
        device: What is asked to copy; None is CUDA.
    """

    name = "cpu"

    def __init__(
        self, *, pin: bool = True, most: int | None = None, window: int = WINDOW, device: Device | None = None
    ) -> None:
        self._device: Device = Cuda() if device is None else device
        free = Pressure().room() if most is None else None
        self._arena = PinnedRanges(
            self._device, pin=pin, most=most or (sys.maxsize if free is None else int(free * _SHARE))
        )
        self._window = self._most_ahead = window
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._takes: dict[torch.device, bool] = {}
        self._order = ReadOrder()
        self._alive: dict[int, CpuSlot] = {}
        self._number = 0
        self._leaving: deque[CpuSlot] = deque()  # whose copy out may not be done
        self._left = 0  # bytes of them
        self._ahead = 0  # bytes read ahead and not asked for
        self._retired: list[LoadedBytes] = []  # read ahead for nothing, and perhaps still being written to
        self._freed: deque[CpuSlot] = deque()
        self._closed = False

    @property
    def window(self) -> int:
        """How many bytes may be on their way, each way."""
        return self._window

    @property
    def pinned(self) -> int:
        """How many bytes of the host's memory are taken."""
        return self._arena.size

    def takes(self, device: torch.device) -> bool:
        """Tell whether moving bytes from this device frees memory there; where it does not, say so once."""
        known = self._takes.get(device)
        if known is None:
            reason = self._device.gains(device)
            known = self._takes[device] = reason is None
            if reason is not None:
                _tell(reason)
        return known

    def put(self, data: Tensor) -> CpuSlot:
        """Copy bytes to the host's memory, behind what the current stream has been given so far.

        Raises:
            OSError: There is no room, or no copy can run now.
        """
        device = self._device
        with self._lock:
            self._settle()
            if self._closed or device.capturing():
                why = "the store is closed" if self._closed else "a CUDA graph is being captured, which moves nothing"
                raise OSError(errno.EBUSY, why)
            if not self._alive:
                self._number = 0
                self._order.ended()
            # Before the stream for copies is entered: Note [Who waits for whom]
            stream = device.current(data.device)
            slot = CpuSlot(self, data, self._arena.take(data.numel()), self._number)
            slot.stream, out = stream, device.own(data.device, "out")
            for event in (device.mark(stream), *slot.place.busy):
                device.after(out, event)
            device.copy(slot.place.host, data, out)
            slot.written = device.mark(out)
            self._alive[slot.number] = slot
            self._number += 1
            self._leaving.append(slot)
            self._left += slot.nbytes
            self._hold_back()
        return slot

    def fetch(self, slot: CpuSlot) -> Tensor:
        """Give a slot's bytes on its device; what the current stream is given from now on comes after them."""
        device = self._device
        with self._lock:
            self._settle()
            _check(slot)
            self._order.asked(slot.number)
            stream = device.current(slot.device)
            target = self._from_source(slot, stream)
            if target is None:
                target = self._arrived(slot, stream)
            self._read_ahead(slot)
        return target

    def expect(self, slot: CpuSlot) -> None:
        """Bring a slot's bytes back, if there is room in the window."""
        with self._lock:
            self._settle()
            self._load_ahead(slot)

    def release(self, slot: CpuSlot) -> None:
        """Give a slot's place back, when it is safe: this may be called in the middle of anything."""
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
        """Give the memory back as soon as no slot needs it."""
        with self._lock:
            self._closed = True
            self._settle()

    def _settle(self) -> None:
        """Look at what has been done since, and let go of what was held for it."""
        if self._device.capturing():
            return  # to ask an event would spoil the capture
        while self._leaving and self._device.reached(self._leaving[0].written):
            self._landed()
        while self._freed:
            self._forget(self._freed.popleft())
        self._retired = [each for each in self._retired if not self._device.reached(each.arrived)]
        if self._closed and not self._alive:
            self._finish()

    def _landed(self) -> None:
        slot = self._leaving.popleft()
        self._left -= slot.nbytes
        # See Note [Bytes of now].
        slot.torn = slot.source is not None and version_of(slot.source) != slot.version
        slot.source = None

    def _hold_back(self) -> None:
        """Wait for copies out as long as more than the window is held for them."""
        while self._left > self._window:
            self._device.wait(self._leaving[0].written)
            self._landed()

    def _forget(self, slot: CpuSlot) -> None:
        del self._alive[slot.number]
        if slot.loaded is not None:
            self._retired.append(slot.loaded)
            self._ahead -= slot.nbytes
            slot.loaded = None
        self._arena.give(slot.place, [slot.written, *slot.read])

    def _finish(self) -> None:
        while self._leaving:
            self._device.wait(self._leaving[0].written)
            self._landed()
        for each in self._retired:
            self._device.wait(each.arrived)
        self._retired = []
        self._arena.close()

    def _from_source(self, slot: CpuSlot, stream: Any) -> Tensor | None:
        """Copy what has not left yet on the device itself; None if it has, or was made on another stream."""
        if slot.source is None or slot.stream != stream:
            return None
        target = self._device.room(slot.nbytes, slot.device)
        self._device.copy(target, slot.source, stream)
        return target

    def _arrived(self, slot: CpuSlot, stream: Any) -> Tensor:
        """Give what was read ahead, or is read now; a stream waits for it."""
        found, slot.loaded = slot.loaded, None
        if found is None:
            found = self._load(slot)
        else:
            self._ahead -= slot.nbytes
        self._device.after(stream, found.arrived)
        if found.stream != stream:
            self._device.lend(found.target, stream)
        return found.target

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

    def _load_ahead(self, slot: CpuSlot) -> bool:
        """Bring a slot's bytes back; False if there is no room in the window, or none on the device."""
        if slot.loaded is not None or slot.source is not None or slot.torn:
            return True
        if self._ahead + slot.nbytes > max(self._most_ahead, slot.nbytes if self._most_ahead else 0):
            return False
        try:
            slot.loaded = self._load(slot)
        except torch.OutOfMemoryError:
            # What is not needed yet must not be what ends the program.
            self._most_ahead = self._ahead
            return False
        self._ahead += slot.nbytes
        return True

    def _read_ahead(self, slot: CpuSlot) -> None:
        for number in self._order.after(slot.number):
            following = self._alive.get(number)
            if following is not None and following.device == slot.device and not self._load_ahead(following):
                return


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


def _tell(reason: str) -> None:
    warn(
        NothingGained(
            f"to=kedge.Cpu() moves nothing: {reason}; they are kept, and what can be rebuilt exactly is rebuilt."
            " kedge.Disk() moves them to a file, kedge.Rebuild() asks for no more than this"
        )
    )
