"""Entries for objects of the program that are held weakly, whatever these say about their equality and their hash."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ByIdentity(MutableMapping[K, V]):
    """A dict whose keys are the objects themselves, as long as they exist.

    `weakref.WeakKeyDictionary` calls the `__hash__` and `__eq__` of its keys. A program's modules
    and optimizers may have their own, which take two of them for one, or raise.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.KeyedRef[int, Any], V]] = {}

    def __getitem__(self, key: K) -> V:
        ref, value = self._entries[id(key)]
        if ref() is not key:
            raise KeyError(id(key))
        return value

    def __setitem__(self, key: K, value: V) -> None:
        known = self._entries.get(id(key))
        ref = (
            known[0]
            if known is not None and known[0]() is key
            else weakref.KeyedRef(key, self._gone, id(key))
        )
        self._entries[id(key)] = ref, value

    def __delitem__(self, key: K) -> None:
        self[key]
        del self._entries[id(key)]

    def __contains__(self, key: object) -> bool:
        known = self._entries.get(id(key))
        return known is not None and known[0]() is key

    def __iter__(self) -> Iterator[K]:
        return iter([key for ref, _ in list(self._entries.values()) if (key := ref()) is not None])

    def __len__(self) -> int:
        return len(self._entries)

    def _gone(self, ref: weakref.KeyedRef[int, Any]) -> None:
        known = self._entries.get(ref.key)
        if known is not None and known[0] is ref:
            del self._entries[ref.key]
