"""What an entry's bytes are brought back from: a slot, a codec's bytes, or the computation that made them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.offload.codecs.codec import Codec
from kedge.offload.codecs.layout import ElementLayout, restore
from kedge.offload.held.raw_bytes import flat, plain, words
from kedge.offload.rebuild.recipe import Recipe
from kedge.offload.stores.store import Store, StoreSlot


class InMemory:
    """A slot whose bytes stay in memory: what a codec made of a tensor when there is no store."""

    __slots__ = ("_data", "nbytes")

    def __init__(self, data: Tensor) -> None:
        self._data, self.nbytes = data, data.nbytes

    def get(self) -> Tensor:
        """Return the bytes."""
        return self._data

    def prefetch(self) -> None:
        """Do nothing: they are there."""

    def free(self) -> None:
        """Do nothing: they go with the last reference."""


@dataclass(slots=True, eq=False)
class InSlot:
    """The bytes, or what a codec made of them, are in a slot.

    Attributes:
        slot: The slot.
    """

    slot: StoreSlot
    computed = False

    def intact(self) -> bool:
        """Whether the bytes can be had: always."""
        return True

    def prefetch(self) -> None:
        """Have the slot bring its bytes."""
        self.slot.prefetch()

    def free(self) -> None:
        """Free the slot."""
        self.slot.free()


@dataclass(slots=True, eq=False)
class Moved(InSlot):
    """The bytes are in a slot: those of a whole storage, or of one tensor of which `layout` says where they lay."""

    layout: ElementLayout | None

    def bring(self) -> Tensor:
        """Get the bytes."""
        data = self.slot.get()
        return data if self.layout is None else restore(data.view(self.layout.dtype), self.layout)

    @property
    def exact(self) -> bool:
        """Whether the bytes come back to the last bit: always."""
        return True


@dataclass(slots=True, eq=False)
class Coded(InSlot):
    """The bytes were encoded, and put into a slot."""

    codec: Codec
    extra: Any

    def bring(self) -> Tensor:
        """Get and decode the bytes."""
        return self.codec.decode(self.slot.get(), self.extra)

    @property
    def exact(self) -> bool:
        """Whether the bytes come back to the last bit."""
        return self.codec.exact


class Rebuilt:
    """The bytes are computed from those of others."""

    __slots__ = ("recipe",)
    computed = True

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @torch.no_grad()
    def bring(self) -> Tensor:
        """Compute the bytes: a recipe makes a storage that is the same from its first byte to its last."""
        return words(self.recipe.run(*(handle.read() for handle in self.recipe.inputs)))

    @property
    def exact(self) -> bool:
        """Whether what they are computed from comes back to the last bit."""
        return all(handle.exact for handle in self.recipe.inputs)

    def intact(self) -> bool:
        """Whether what they are computed from is as it was."""
        return all(handle.intact() for handle in self.recipe.inputs)

    def prefetch(self) -> None:
        """Do nothing: what they are computed from is asked for by its own turn."""

    def free(self) -> None:
        """Do nothing: only the handles are held, which go with this."""


def encode(store: Store | None, codec: Codec, value: Tensor, *, alone: bool) -> Coded | None:
    """Encode a tensor's whole storage, or the tensor alone, and put the result into a store, or keep it in memory."""
    coded = codec.encode(plain(value) if alone else flat(value))
    if coded is None:
        return None
    data = coded[0].view(torch.uint8)
    return Coded(InMemory(data) if store is None else store.put(data), codec, coded[1])
