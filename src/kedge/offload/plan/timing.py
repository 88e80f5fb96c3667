"""The times of each saved tensor in the step that is learned from, and of the store, the codec and the recipes.

# Note [Own time]
What Kedge does in that step - move, encode, find, rebuild - is marked at its beginning and its end, and taken out of
every time that is noted: what is left is when the program itself saves and asks. On a device, the marks are its events
on the stream that computes, so a wait for a copy lies between two of them as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kedge.offload.codecs.codec import Codec
from kedge.offload.held.handle import Handle
from kedge.offload.plan.clock import HostClock, TimingClock, clock_of
from kedge.offload.plan.tables import TensorKey
from kedge.offload.rebuild.recipe import Cost, Find, HandleOf, Recipe
from kedge.offload.stores.store import Store, StoreSlot

Span = tuple[Any, Any]


class TensorTimes:
    """What is known of one saved tensor.

    Attributes:
        key: Which one.
        nbytes: Its bytes.
        group: What was done: the group of its `Outcome`.
        took: From when to when it was saved.
        asked: From when to when bytes were got for it, for each time.
        ran: From when to when it was rebuilt, for each time.
        coding: From when to when it was encoded or decoded.
        extra: The bytes that are kept to rebuild it.
        coded: The bytes that a codec made of it.
    """

    __slots__ = ("asked", "coded", "coding", "extra", "group", "key", "nbytes", "ran", "took")

    def __init__(self, key: TensorKey, nbytes: int, begun: Any) -> None:
        self.key, self.nbytes, self.group = key, nbytes, ""
        self.took: Span = (begun, begun)
        self.asked: list[Span] = []
        self.ran: list[Span] = []
        self.coding: list[Span] = []
        self.extra = 0
        self.coded: int | None = None


class Timings:
    """The times of one step, while it is learned from; otherwise it costs nothing.

    Attributes:
        current: Those of the tensor that is being saved; None while nothing is learned.
        clock: What marks moments.
        device: The device of what was saved last.
        started: When the step began; None while nothing is learned.
        notes: Those of the step's tensors.
    """

    def __init__(self) -> None:
        self.current: TensorTimes | None = None
        self.clock: TimingClock = HostClock()
        self.device = torch.device("cpu")
        self.started: Any = None
        self.notes: list[TensorTimes] = []

    def begin_step(self) -> None:
        """Learn from the step that begins."""
        self.clock = clock_of(self.device)
        self.started, self.notes = self.clock.mark(), []

    def end_step(self) -> None:
        """Learn nothing more."""
        self.started, self.notes = None, []

    def begin_tensor(self, key: TensorKey, nbytes: int) -> None:
        """Note that a tensor is being saved, if the step is learned from."""
        if self.started is not None:
            self.current = TensorTimes(key, nbytes, self.clock.mark())
            self.notes.append(self.current)

    def end_tensor(self, group: str) -> None:
        """Note what was done with it."""
        if self.current is not None:
            self.current.group = group
            self.current.took = self.current.took[0], self.clock.mark()
            self.current = None


class TimedRecipe:
    """A recipe whose runs are timed."""

    def __init__(self, recipe: Recipe, note: TensorTimes, timings: Timings) -> None:
        self._recipe, self._note, self._timings = recipe, note, timings
        self.rule: str = recipe.rule
        self.inputs: tuple[Handle, ...] = recipe.inputs
        self.extra: Tensor | None = recipe.extra
        self.nbytes: int = recipe.nbytes
        self.cost: Cost = recipe.cost

    def run(self, *inputs: Tensor) -> Tensor:
        """Run it; a run while it is saved is one that verifies it, and not counted."""
        begun = self._timings.clock.mark()
        made = self._recipe.run(*inputs)
        if self._timings.current is not self._note:
            self._note.ran.append((begun, self._timings.clock.mark()))
        return made


class TimedSlot:
    """A slot that notes when it is asked for its bytes."""

    __slots__ = ("_note", "_slot", "_timings", "nbytes")

    def __init__(self, slot: StoreSlot, note: TensorTimes, timings: Timings) -> None:
        self._slot, self._note, self._timings = slot, note, timings
        self.nbytes = slot.nbytes

    def get(self) -> Tensor:
        """Get the bytes."""
        begun = self._timings.clock.mark()
        data = self._slot.get()
        self._note.asked.append((begun, self._timings.clock.mark()))
        return data

    def prefetch(self) -> None:
        """Have the slot bring its bytes."""
        self._slot.prefetch()

    def free(self) -> None:
        """Free the slot."""
        self._slot.free()


class TimedStore:
    """A store whose slots note when they are asked, while one is learned."""

    def __init__(self, store: Store, timings: Timings) -> None:
        self._store, self._timings = store, timings
        self.name: str = store.name

    def takes(self, device: torch.device) -> bool:
        """Whether the store takes bytes of a device."""
        return self._store.takes(device)

    def put(self, data: Tensor) -> StoreSlot:
        """Put the bytes into the store."""
        self._timings.device = data.device
        slot = self._store.put(data)
        note = self._timings.current
        return slot if note is None else TimedSlot(slot, note, self._timings)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class TimedCodec:
    """A codec that notes how long it takes, and how many bytes it makes."""

    def __init__(self, codec: Codec, timings: Timings) -> None:
        self._codec, self._timings = codec, timings
        self.name: str = codec.name
        self.exact: bool = codec.exact

    def encode(self, value: Tensor) -> tuple[Tensor, Any] | None:
        """Encode."""
        self._timings.device = value.device
        note = self._timings.current
        if note is None:
            coded = self._codec.encode(value)
            return None if coded is None else (coded[0], (None, coded[1]))
        begun = self._timings.clock.mark()
        coded = self._codec.encode(value)
        if coded is None:
            return None
        note.coding.append((begun, self._timings.clock.mark()))
        note.coded = coded[0].nbytes
        return coded[0], (note, coded[1])

    def decode(self, kept: Tensor, extra: Any) -> Tensor:
        """Decode."""
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
    """Find recipes that note how long they run, while one is learned."""

    def finds(value: Tensor, handle_of: HandleOf) -> Recipe | None:
        timings.device = value.device
        recipe = find(value, handle_of)
        note = timings.current
        if recipe is None or note is None:
            return recipe
        note.extra = recipe.nbytes
        return TimedRecipe(recipe, note, timings)

    return finds
