"""A small engine for tests of exact rebuilding: what can be rebuilt is dropped, all else is kept by reference."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

from kedge.offload.held.handle import Handle
from kedge.offload.rebuild import find

WINDOW = 96 << 20
"""The bytes of what was rebuilt last that are kept, for whoever asks next."""


class Entry:
    """A storage at one version: its bytes, or the recipe for them."""

    def __init__(self, held, version, recipe):
        self.held, self.version, self.recipe = held, version, recipe
        self.again = None

    def storage(self, engine):
        if self.recipe is None:
            return self.held.untyped_storage()
        storage = None if self.again is None else self.again()
        if storage is None:
            made = self.recipe.run(*(handle.read() for handle in self.recipe.inputs))
            storage = made.untyped_storage()
            self.again = weakref.ref(storage)
            engine.remember(storage)
        return storage


class Stand(Handle):
    """Stands for one saved tensor."""

    __slots__ = ("device", "dtype", "engine", "entry", "offset", "size", "stride")

    def __init__(self, value, entry, engine):
        self.entry, self.engine = entry, engine
        self.size, self.stride, self.offset = value.size(), value.stride(), value.storage_offset()
        self.dtype, self.device = value.dtype, value.device

    def intact(self):
        return self.entry.recipe is not None or self.entry.held._version == self.entry.version

    def read(self):
        if not self.intact():
            raise RuntimeError("modified by an inplace operation")
        made = torch.empty(0, dtype=self.dtype, device=self.device)
        return made.set_(self.entry.storage(self.engine), self.offset, self.size, self.stride)


class Engine:
    """Packs and unpacks; counts the bytes of what was packed, of their storages, and of what is kept in the end.

    With ``check``, everything that a recipe gives is compared with what it stands for as soon as it
    is packed.
    """

    def __init__(
        self, model=None, inputs=(), *, least=65_536, check=False, rules=True, finder=find
    ):
        owned = [] if model is None else [*model.parameters(), *model.buffers()]
        self.owned = {t.untyped_storage() for t in (*owned, *inputs)}
        self.least, self.check, self.rules, self.finder = least, check, rules, finder
        self.entries = weakref.WeakKeyDictionary()
        self.window, self.held = deque(), 0
        self.packed = self.unique = self.kept = 0
        self.rebuilt, self.wrong = Counter(), Counter()
        self.left = Counter()
        self.by = Counter()

    def handle_of(self, saved):
        return saved.data if isinstance(saved.data, Stand) else None

    def pack(self, value):
        storage = value.untyped_storage()
        self.packed += value.nbytes
        known = self.entries.get(storage)
        entry = None if known is None else known()
        if entry is None or entry.version != value._version:
            recipe = None
            if storage not in self.owned:
                self.unique += storage.nbytes()
                recipe = self.recipe(value, storage)
                if recipe is None:
                    self.kept += storage.nbytes()
                    made = value if value._base is None else value._base
                    self.left[made.grad_fn and made.grad_fn.name()] += storage.nbytes()
            entry = Entry(None if recipe else value.detach(), value._version, recipe)
            self.entries[storage] = weakref.ref(entry)
        return Stand(value, entry, self)

    def recipe(self, value, storage):
        if not self.rules or storage.nbytes() < self.least:
            return None
        recipe = self.finder(value, self.handle_of)
        if recipe is None:
            return None
        if self.check and not same_bits(
            recipe.run(*(h.read() for h in recipe.inputs)), value.detach()
        ):
            self.wrong[recipe.rule] += 1
            return None
        self.rebuilt[recipe.rule] += 1
        self.by[recipe.rule] += storage.nbytes() - recipe.nbytes
        self.kept += recipe.nbytes
        return recipe

    def remember(self, storage):
        self.window.append(storage)
        self.held += storage.nbytes()
        while self.held > WINDOW and len(self.window) > 1:
            self.held -= self.window.popleft().nbytes()

    @contextmanager
    def in_force(self):
        with saved_tensors_hooks(self.pack, Stand.read):
            yield self


_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(left, right):
    """Whether two tensors are the same to the last bit, NaN, signed zeros and strides included."""
    if left.dtype != right.dtype or left.shape != right.shape or left.stride() != right.stride():
        return False
    kind = torch.uint8 if left.dtype == torch.bool else _INTEGER[left.element_size()]
    return torch.equal(left.contiguous().view(kind), right.contiguous().view(kind))
