"""The times of each saved tensor in the timed step, of the store, the codec and the recipes.

# Note [Own time]
Each of Kedge's own operations in that step (move, encode, find, rebuild) has a mark at its
beginning and its end, and its time is subtracted from every recorded time: the rest is when the
program itself saves and reads. On a device, the marks are events on the stream that computes, so a
wait for a copy also lies between two of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kedge.offload.codecs.codec import Codec
from kedge.offload.held.handle import Handle
from kedge.offload.plan.tables import TensorKey
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
    """

    def __init__(self) -> None:
        self.current: TensorTimes | None = None
        self.clock: TimingClock = HostClock()
        self.device = torch.device("cpu")
        self.started: Any = None
        self.notes: list[TensorTimes] = []

    def begin_step(self) -> None:
        """Begin to time a step."""
        self.clock = clock_of(self.device)
        self.started = self.clock.mark()
        self.notes = []

    def end_step(self) -> None:
        """Stop timing."""
        self.started = None
        self.notes = []

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
