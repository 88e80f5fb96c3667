"""The sources that an entry's bytes are brought back from: a slot, a codec's bytes, or a recipe."""

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
    """A slot whose bytes stay in memory: a codec's result without a store."""

    __slots__ = ("_data", "nbytes")

    def __init__(self, data: Tensor) -> None:
        self._data = data
        self.nbytes = data.nbytes

    def get(self) -> Tensor:
        """Return the bytes."""
        return self._data

    def prefetch(self) -> None:
        """Nothing: the bytes are in memory."""

    def free(self) -> None:
        """Nothing: the bytes are freed with the last reference."""


@dataclass(slots=True, eq=False)
class InSlot:
    """The base of sources whose bytes, plain or encoded, are in a slot.

    Attributes:
        slot: The slot.
    """

    slot: StoreSlot
    computed = False

    def intact(self) -> bool:
        """Whether the bytes can be brought back: always."""
        return True

    def prefetch(self) -> None:
        """Begin to bring the bytes back."""
        self.slot.prefetch()

    def free(self) -> None:
        """Free the slot."""
        self.slot.free()


@dataclass(slots=True, eq=False)
class Moved(InSlot):
    """Plain bytes in a slot: those of a whole storage, or of one tensor that lay as `layout` describes."""

    layout: ElementLayout | None

    def bring(self) -> Tensor:
        """Return the bytes."""
        data = self.slot.get()
        layout = self.layout
        if layout is None:
            return data
        return restore(data.view(layout.dtype), layout)

    @property
    def exact(self) -> bool:
        """Whether the bytes come back to the last bit: always."""
        return True


@dataclass(slots=True, eq=False)
class Coded(InSlot):
    """Encoded bytes in a slot."""

    codec: Codec
    extra: Any

    def bring(self) -> Tensor:
        """Return the decoded tensor."""
        return self.codec.decode(self.slot.get(), self.extra)

    @property
    def exact(self) -> bool:
        """Whether the bytes come back to the last bit."""
        return self.codec.exact


class Rebuilt:
    """Bytes that a recipe computes from those of other saved tensors."""

    __slots__ = ("recipe",)
    computed = True

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @torch.no_grad()
    def bring(self) -> Tensor:
        """Return the computed bytes.

        A recipe makes a storage that is equal from its first byte to its last.
        """
        recipe = self.recipe
        return words(recipe.run(*(handle.read() for handle in recipe.inputs)))

    @property
    def exact(self) -> bool:
        """Whether the recipe's inputs come back to the last bit."""
        return all(handle.exact for handle in self.recipe.inputs)

    def intact(self) -> bool:
        """Whether the recipe's inputs are unchanged."""
        return all(handle.intact() for handle in self.recipe.inputs)

    def prefetch(self) -> None:
        """Nothing: the recipe's inputs are prefetched by themselves."""

    def free(self) -> None:
        """Nothing: this object holds only handles, which are freed with it."""


def encode(store: Store | None, codec: Codec, value: Tensor, *, alone: bool) -> Coded | None:
    """Return the encoded storage, or tensor alone, in a store or in memory.

    Returns:
        None if the codec does not apply.
    """
    values = plain(value) if alone else flat(value)
    coded = codec.encode(values)
    if coded is None:
        return None

    data, extra = coded
    data = data.view(torch.uint8)
    slot: StoreSlot = InMemory(data) if store is None else store.put(data)
    return Coded(slot, codec, extra)
