"""What an entry's bytes are brought back from: a slot, a codec's bytes, or the computation that made them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kedge.offload.codecs.codec import Codec
from kedge.offload.codecs.layout import Layout, flatten, restore
from kedge.offload.held.raw_bytes import flat, plain, run, words
from kedge.offload.rebuild.recipe import Recipe
from kedge.offload.stores.store import Slot, Store


class Held:
    """Bytes that stay in memory: what a codec made of a tensor when there is no store."""

    __slots__ = ("_data", "nbytes")

    def __init__(self, data: Tensor) -> None:
        self._data, self.nbytes = data, data.nbytes

    def get(self) -> Tensor:
        """Return them."""
        return self._data

    def wanted(self) -> None:
        """They are there."""

    def free(self) -> None:
        """They go with the last reference."""


class InSlot:
    """The bytes, or what a codec made of them, are in a slot."""

    __slots__ = ("_slot",)
    computed = False

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def intact(self) -> bool:
        """They are."""
        return True

    def wanted(self) -> None:
        """Tell the slot."""
        self._slot.wanted()

    def free(self) -> None:
        """Free the slot."""
        self._slot.free()


class Moved(InSlot):
    """The bytes are in a slot: those of a whole storage, or of one tensor of which `layout` tells where they lay."""

    __slots__ = ("_layout", "nbytes")

    def __init__(self, slot: Slot, layout: Layout | None) -> None:
        super().__init__(slot)
        self._layout, self.nbytes = layout, slot.nbytes

    def bring(self) -> Tensor:
        """Get them."""
        data = self._slot.get()
        return data if self._layout is None else restore(data.view(self._layout.dtype), self._layout)

    @property
    def exact(self) -> bool:
        """They are to the last bit."""
        return True


class Coded(InSlot):
    """The bytes were encoded, and put into a slot."""

    __slots__ = ("_codec", "_extra")

    def __init__(self, slot: Slot, codec: Codec, extra: Any) -> None:
        super().__init__(slot)
        self._codec, self._extra = codec, extra

    def bring(self) -> Tensor:
        """Get and decode them."""
        return self._codec.decode(self._slot.get(), self._extra)

    @property
    def exact(self) -> bool:
        """Whether they come back to the last bit."""
        return self._codec.exact


class Rebuilt:
    """The bytes are computed from those of others."""

    __slots__ = ("recipe",)
    computed = True

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @torch.no_grad()
    def bring(self) -> Tensor:
        """Compute them: a recipe makes a storage that is the same from its first byte to its last."""
        return words(self.recipe.run(*(handle.read() for handle in self.recipe.inputs)))

    @property
    def exact(self) -> bool:
        """Whether what they are computed from comes back to the last bit."""
        return all(handle.exact for handle in self.recipe.inputs)

    def intact(self) -> bool:
        """Tell whether what they are computed from is as it was."""
        return all(handle.intact() for handle in self.recipe.inputs)

    def wanted(self) -> None:
        """What they are computed from is asked for by its own turn."""

    def free(self) -> None:
        """Nothing is held but the handles, which go with this."""


def put(store: Store | None, data: Tensor) -> Slot:
    """Put bytes into a store; without one they stay in memory."""
    return Held(data) if store is None else store.put(data)


def move(store: Store, value: Tensor, *, alone: bool) -> Moved:
    """Put a tensor's whole storage, or the tensor alone, into a store."""
    if not alone:
        return Moved(store.put(words(value)), None)
    found = flatten(plain(value))
    if found is None:
        return Moved(store.put(run(value).view(torch.uint8)), None)
    elements, layout = found
    return Moved(store.put(elements.contiguous().view(torch.uint8)), layout)


def encode(store: Store | None, codec: Codec, value: Tensor, *, alone: bool) -> tuple[Coded, int] | None:
    """Encode a tensor's whole storage, or the tensor alone, and put the result into a store; with how many bytes."""
    coded = codec.encode(plain(value) if alone else flat(value))
    if coded is None:
        return None
    kept, extra = coded
    slot = put(store, kept.view(torch.uint8))
    return Coded(slot, codec, extra), kept.nbytes
