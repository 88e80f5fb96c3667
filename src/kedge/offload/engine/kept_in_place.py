"""What is kept by reference by choice: known by storage within a step, and counted for as long as it is held.

A graph of an earlier step may live on, such as one that is retained. A plan, which is for one step, does not see what that
holds; this count does.
"""

from __future__ import annotations

import weakref

from kedge.offload.account import Account
from kedge.offload.held.steps import Call


class Stay:
    """Lives as long as a storage is held by what was saved on it."""

    __slots__ = ("__weakref__", "_account", "_nbytes")

    def __init__(self, account: Account, nbytes: int) -> None:
        self._account, self._nbytes = account, nbytes
        account.stays(nbytes)

    def __del__(self) -> None:
        self._account.stays(-self._nbytes)


class Stayer:
    """The reader of one tensor on such a storage; see `kedge.hooks.saved.reference.Reader`."""

    __slots__ = ("_call", "_stay")

    def __init__(self, call: Call, stay: Stay) -> None:
        self._call, self._stay = call, stay

    def unpacked(self) -> None:
        """Tell the call."""
        self._call.unpacked()


class Staying:
    """The storages of this step that stay, so that each is decided on once."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._known: dict[int, tuple[int, weakref.ref[Stay]]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, nbytes: int, number: int | None) -> Stay:
        """Hear that a storage stays; without its number, only one tensor of it."""
        stay = Stay(self._account, nbytes)
        if number is not None:
            self._known[number] = nbytes, weakref.ref(stay)
        return stay

    def find(self, number: int) -> Stay | None:
        """Return what is to be held by who saves on a storage that stays; None if it was not decided that it does."""
        known = self._known.get(number)
        return None if known is None else known[1]() or self.begin(known[0], number)

    def forget(self) -> None:
        """Begin a step."""
        self._known = {}
