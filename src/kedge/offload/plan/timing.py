"""The times of each saved tensor in the timed step, of the store, the codec and the recipes.

# Note [Own time]
Each of Kedge's own operations in that step (move, encode, find, rebuild) has a mark at its
beginning and its end, and its time is subtracted from every recorded time: the rest is when the
program itself saves and reads. On a device, the marks are events on the stream that computes, so a
wait for a copy also lies between two of them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from kedge.offload.codecs.codec import Codec
from kedge.offload.held.handle import Handle
from kedge.offload.plan.tables import CallKey, TensorKey
from kedge.offload.rebuild.recipe import Cost, Find, HandleOf, Recipe
from kedge.offload.stores.store import Store, StoreSlot
from kedge.torch_internals import accelerators

Span = tuple[Any, Any]


class TimingClock(Protocol):
    """A clock that marks moments now, and returns the time between two marks later."""

    def mark(self) -> Any:
        """Return a mark of this moment."""

    def between(self, first: Any, last: Any) -> float:
        """Return the seconds between two marks; it may wait for them."""


class HostClock:
    """The clock of the host, where an operation is done when its call returns."""

    def mark(self) -> float:
        """Return the time in seconds."""
        return time.perf_counter()

    def between(self, first: float, last: float) -> float:
        """Return the seconds between two marks."""
        return last - first


class DeviceClock:
    """The clock of a device: events on the stream that the program computes on.

    If the device waits for the host, the time between two events includes the wait.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Return a new event, recorded on the current stream."""
        return accelerators.timed_mark(self._device)

    def between(self, first: Any, last: Any) -> float:
        """Return the seconds between two events; waits for the later one."""
        last.synchronize()
        return accelerators.seconds(first, last) or 0.0


def clock_of(device: torch.device) -> TimingClock:
    """Return the clock of a device."""
    if accelerators.has_clock(device):
        return DeviceClock(device)
    return HostClock()


class CallTimes:
    """A call of a module that may be run again, and its measurements in a timed step.

    Attributes:
        key: Its key.
        again: Whether it is run again in backward.
        nbytes: Of a call that is run again, the bytes that it saved and did not keep.
        inputs: The bytes of its inputs.
        lasted: The span of the call in the forward; None outside of a timed step.
        ran: The span of each second run.
    """

    __slots__ = ("_saved", "_timings", "again", "inputs", "key", "lasted", "nbytes", "ran")

    def __init__(self, key: CallKey, timings: Timings, *, again: bool) -> None:
        self.key = key
        self.again = again
        self.nbytes = 0
        self.inputs = 0
        self.lasted: Span | None = None
        self.ran: list[Span] = []
        self._saved: Counter[str | None] = Counter()
        self._timings = timings

    def begin(self) -> None:
        """Begin the call, and to time it in a timed step; what this thread saves from now on is its own."""
        timings = self._timings
        timings.thread.call = self
        if timings.started is not None:
            begun = timings.clock.mark()
            self.lasted = begun, begun
            timings.calls.append(self)

    def end(self, nbytes: int = 0, inputs: int = 0) -> None:
        """End the call."""
        self.nbytes = nbytes
        self.inputs = inputs
        self._timings.thread.call = None
        if self.lasted is not None:
            self.lasted = self.lasted[0], self._timings.clock.mark()

    def key_of(self, path: str | None) -> TensorKey:
        """Return the key of the next tensor that it saves."""
        number = self._saved[path]
        self._saved[path] = number + 1
        return TensorKey(path, number, call=self.key)

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Context around the second run."""
        if self.lasted is None:
            yield
            return
        begun = self._timings.clock.mark()
        try:
            yield
        finally:  # PyTorch ends a second run by an exception
            self.ran.append((begun, self._timings.clock.mark()))


class _Thread(threading.local):
    """The call that is running on each thread, of those that may be run again."""

    call: CallTimes | None = None


class TensorTimes:
    """The measurements of one saved tensor.

    Attributes:
        key: Its key.
        nbytes: Its bytes.
        group: The group of its `Outcome`.
        took: The span in which it was saved.
        asked: The span of each read of its bytes.
        ran: The span of each rebuild.
        coding: The span of each encoding and decoding.
        extra: The bytes that are kept to rebuild it.
        coded: The bytes of its encoded form; None if no codec encoded it.
    """

    __slots__ = ("asked", "coded", "coding", "extra", "group", "key", "nbytes", "ran", "took")

    def __init__(self, key: TensorKey, nbytes: int, begun: Any) -> None:
        self.key = key
        self.nbytes = nbytes
        self.group = ""
        self.took: Span = (begun, begun)
        self.asked: list[Span] = []
        self.ran: list[Span] = []
        self.coding: list[Span] = []
        self.extra = 0
        self.coded: int | None = None


class Timings:
    """The times of one step, recorded only in a timed step.

    Attributes:
        current: The times of the tensor that is being saved; None outside of a timed step.
        clock: The clock that marks moments.
        device: The device of the tensor saved last.
        started: When the step began; None outside of a timed step.
        notes: The times of the step's tensors.
        calls: The times of its calls of modules that may be run again.
        thread: The one that is running on this thread.
    """

    def __init__(self) -> None:
        self.current: TensorTimes | None = None
        self.calls: list[CallTimes] = []
        self.thread = _Thread()
        self.clock: TimingClock = HostClock()
        self.device = torch.device("cpu")
        self.started: Any = None
        self.notes: list[TensorTimes] = []

    def begin_step(self) -> None:
        """Begin to time a step."""
        self.clock = clock_of(self.device)
        self.started = self.clock.mark()
        self.notes = []
        self.calls = []

    def end_step(self) -> None:
        """Stop timing."""
        self.started = None
        self.notes = []
        self.calls = []

    def begin_tensor(self, key: TensorKey, nbytes: int) -> None:
        """Begin to time the saving of a tensor, in a timed step."""
        if self.started is not None:
            self.current = TensorTimes(key, nbytes, self.clock.mark())
            self.notes.append(self.current)

    def end_tensor(self, group: str) -> None:
        """Stop timing the tensor, and record the group of its outcome."""
        if self.current is not None:
            self.current.group = group
            self.current.took = self.current.took[0], self.clock.mark()
            self.current = None


class TimedRecipe:
    """A recipe whose runs are timed."""

    def __init__(self, recipe: Recipe, note: TensorTimes, timings: Timings) -> None:
        self._recipe = recipe
        self._note = note
        self._timings = timings
        self.rule: str = recipe.rule
        self.inputs: tuple[Handle, ...] = recipe.inputs
        self.extra: Tensor | None = recipe.extra
        self.nbytes: int = recipe.nbytes
        self.cost: Cost = recipe.cost

    def run(self, *inputs: Tensor) -> Tensor:
        """Run the recipe, and time it.

        A run while the tensor is being saved only verifies the recipe, and does not count.
        """
        begun = self._timings.clock.mark()
        made = self._recipe.run(*inputs)
        if self._timings.current is not self._note:
            self._note.ran.append((begun, self._timings.clock.mark()))
        return made


class TimedSlot:
    """A slot that times the reads of its bytes."""

    __slots__ = ("_note", "_slot", "_timings", "nbytes")

    def __init__(self, slot: StoreSlot, note: TensorTimes, timings: Timings) -> None:
        self._slot = slot
        self._note = note
        self._timings = timings
        self.nbytes = slot.nbytes

    def get(self) -> Tensor:
        """Return the bytes."""
        begun = self._timings.clock.mark()
        data = self._slot.get()
        self._note.asked.append((begun, self._timings.clock.mark()))
        return data

    def prefetch(self) -> None:
        """Begin to bring the bytes back."""
        self._slot.prefetch()

    def free(self) -> None:
        """Free the slot."""
        self._slot.free()


class TimedStore:
    """A store whose slots time their reads, in a timed step."""

    def __init__(self, store: Store, timings: Timings) -> None:
        self._store = store
        self._timings = timings
        self.name: str = store.name

    def takes(self, device: torch.device) -> bool:
        """Whether the store takes bytes of a device."""
        return self._store.takes(device)

    def put(self, data: Tensor) -> StoreSlot:
        """Put bytes into the store."""
        self._timings.device = data.device
        slot = self._store.put(data)
        note = self._timings.current
        if note is None:
            return slot
        return TimedSlot(slot, note, self._timings)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class TimedCodec:
    """A codec that records its time and the size of its result, in a timed step."""

    def __init__(self, codec: Codec, timings: Timings) -> None:
        self._codec = codec
        self._timings = timings
        self.name: str = codec.name
        self.exact: bool = codec.exact

    def encode(self, value: Tensor) -> tuple[Tensor, Any] | None:
        """Return the encoded bytes and the extra argument for `decode`.

        Returns:
            None if the codec does not apply.
        """
        timings = self._timings
        timings.device = value.device
        note = timings.current
        begun = None if note is None else timings.clock.mark()
        coded = self._codec.encode(value)
        if coded is None:
            return None

        data, extra = coded
        if note is not None:
            note.coding.append((begun, timings.clock.mark()))
            note.coded = data.nbytes
        return data, (note, extra)

    def decode(self, kept: Tensor, extra: Any) -> Tensor:
        """Return the decoded tensor."""
        note, inner = extra
        if note is None:
            return self._codec.decode(kept, inner)
        begun = self._timings.clock.mark()
        value = self._codec.decode(kept, inner)
        span = begun, self._timings.clock.mark()
        note.coding.append(span)
        note.asked.append(span)
        return value


def timed_find(find: Find, timings: Timings) -> Callable[[Tensor, HandleOf], Recipe | None]:
    """Return a `Find` whose recipes time their runs, in a timed step."""

    def finds(value: Tensor, handle_of: HandleOf) -> Recipe | None:
        timings.device = value.device
        recipe = find(value, handle_of)
        note = timings.current
        if recipe is None or note is None:
            return recipe
        note.extra = recipe.nbytes
        return TimedRecipe(recipe, note, timings)

    return finds
