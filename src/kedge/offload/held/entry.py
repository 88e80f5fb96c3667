"""Bytes that several saved tensors share: moved, compressed or to be computed again, and once at most.

# Note [What makes two saved tensors one]
The same storage object at the same version. An address is no identity: it is given away again when
its storage is freed. A weak reference to the storage keeps its number from that.

Versions are counted by tensor, not by storage: ``x.data`` and what ``set_()`` makes count on their
own. So two tensors at the same version that is not 0 must also be the same tensor, or views of one;
and the bytes must come to the same as they did (Note [Digest]): that finds what a program
changes behind autograd's back (``x.data[3] = 0`` between two uses of ``x``).

# Note [Brought back]
Bytes that were brought back are shared by weak reference: while a node runs, all its handles get the same. Those
brought back last are held for a moment more if other handles want them too: autograd's nodes run one after the other, and
each lets go before the next begins. If one has not, the next gets its own: a node can return what it saved as a
gradient, which then is ``.grad`` without a copy, since nobody else seems to have it; two of them must not be one.

# Note [Changed since]
What is given out can be changed in place: by a Function that works in what it saved, or through a node's
``_saved_self``. That is never given out again: the next handle gets what was saved, brought anew. To tell, all tensors
that are given out on one storage share one version counter, that of an empty tensor of ours, which holds no
memory; autograd gives what it unpacks the counter of what it was given. What counts nowhere, a change through ``.data``,
is not seen, as it is not where autograd holds the tensor itself.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from kedge.errors import RebuiltWrong
from kedge.offload.account import Row
from kedge.offload.held.digest import Digest, digest, same
from kedge.offload.held.span import Key
from kedge.torch_internals.autograd_nodes import numbers_operations, sequence_number
from kedge.torch_internals.graph_task import current_node, graph_task
from kedge.torch_internals.storages import behind, users_of
from kedge.torch_internals.tensors import changes, root_of


class Source(Protocol):
    """What an entry's bytes are brought back from.

    Attributes:
        computed: Whether they are computed, and so may have come out wrong.
    """

    computed: bool

    @property
    def exact(self) -> bool:
        """Whether the bytes come back to the last bit."""

    def bring(self) -> Tensor:
        """Return a tensor that begins where the entry's bytes begin."""

    def intact(self) -> bool:
        """Tell whether `bring` can give the bytes that were saved."""

    def wanted(self) -> None:
        """Hear that they are needed soon."""

    def free(self) -> None:
        """Let go."""


class Brought(NamedTuple):
    """Bytes that were brought back.

    Attributes:
        storage: What has them.
        begin: Where in it they begin.
        counter: Counts the changes of what is given out on them; see Note [Changed since].
    """

    storage: torch.UntypedStorage
    begin: int
    counter: Tensor

    def give(self, value: Tensor) -> Tensor:
        """Return an alias of a tensor on these bytes whose changes are counted."""
        given = self.counter.detach()
        given.data = value
        return given


class Window:
    """Holds on to what was brought back last, a bounded number of bytes of it; see Note [Brought back]."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._last: deque[weakref.ref[Entry]] = deque()

    def hold(self, entry: Entry, home: Tensor) -> None:
        """Hold what an entry was brought back as; what was held longest goes if there is no room."""
        entry.held = home
        live = [each for ref in list(self._last) if (each := ref()) is not None and each.held is not None]
        live = [each for each in live if each is not entry]
        room = self._room - entry.nbytes
        while live and sum(each.nbytes for each in live) > room:
            live.pop(0).held = None
        self._last = deque(each.itself for each in [*live, entry])


class Entry:
    """The bytes of one storage at one version, or of one small part of a large storage.

    Attributes:
        source: What they are brought back from.
        nbytes: How many they are.
        alone: Whether they are those of one tensor, and not of its whole storage.
        device: Where they belong.
        row: The module that saved them first, in the account.
    """

    __slots__ = (
        "__weakref__", "_back", "_before", "_digest", "_entries", "_key", "_reads", "_root", "_storage",
        "_version", "_window", "alone", "device", "held", "itself", "nbytes", "row", "source",
    )  # fmt: skip

    def __init__(self, entries: Entries, source: Source, value: Tensor, key: Key, row: Row) -> None:
        self.source, self.row = source, row
        self.alone = not isinstance(key, int)
        self.nbytes = value.nbytes if self.alone else value.untyped_storage().nbytes()
        self.device = value.device
        self.held: Tensor | None = None
        self.itself = weakref.ref(self)
        self._entries, self._key = entries.table, key
        self._window = entries.window
        self._storage = StorageWeakRef(value.untyped_storage())
        self._version = changes(value)
        self._root = weakref.ref(root_of(value)) if self._version else None
        self._digest = digest(value, alone=self.alone)
        self._back: tuple[StorageWeakRef, int, Tensor, object] | None = None
        self._reads = 0
        self._before = entries.latest
        entries.latest = self.itself
        self._entries[key] = self.itself

    def __del__(self) -> None:
        if self._entries.get(self._key) is self.itself:
            del self._entries[self._key]
        self.row.gone(self.nbytes)
        self.source.free()

    def stands_for(self, value: Tensor) -> bool:
        """Tell whether these are the bytes that a tensor has now; see Note [What makes two saved tensors one]."""
        if changes(value) != self._version or (self._root is not None and self._root() is not root_of(value)):
            return False
        return self._digest is None or _comes_to(value, self._digest, alone=self.alone)

    def home(self) -> Brought:
        """Return a storage that has the bytes, and where in it they begin; see Note [Brought back]."""
        back, asker = self._back, _asker()
        if back is not None:
            there = behind(back[0].cdata)
            alone = there is not None and users_of(there) <= 1 + (self.held is not None)
            if there is not None and not changes(back[2]) and (alone or back[3] == asker):
                self._back = *back[:3], asker
                return Brought(there, *back[1:3])
            del there  # what was changed makes room for what was saved
            self._back = self.held = None
        begun = time.perf_counter()
        home = self.source.bring()
        if self.source.computed and self.source.exact and self._digest is not None:
            _check(home, self._digest)
        self.row.brought(self.nbytes, time.perf_counter() - begun, again=self._reads > 0)
        self._reads += 1
        storage = home.untyped_storage()
        begin = int(home.storage_offset()) * home.itemsize
        counter = torch.empty(0, device=self.device)
        self._back = StorageWeakRef(storage), begin, counter, asker  # in one go: another thread may read
        self._window.hold(self, home)
        self._ahead()
        return Brought(storage, begin, counter)

    def _ahead(self) -> None:
        """Say that what was saved before is wanted next."""
        before = self._before() if self._before is not None else None
        if before is not None and before.held is None:
            before.source.wanted()


class Entries:
    """The entries that live, by storage.

    Attributes:
        table: From what makes an entry one to a weak reference to it.
        latest: The one made last.
        window: What was brought back last.
    """

    def __init__(self, window: Window) -> None:
        self.table: dict[Key, weakref.ref[Entry]] = {}
        self.latest: weakref.ref[Entry] | None = None
        self.window = window

    def find(self, key: Key, value: Tensor) -> Entry | None:
        """Return the entry that has a tensor's bytes."""
        ref = self.table.get(key)
        entry = ref() if ref is not None else None
        return entry if entry is not None and entry.stands_for(value) else None


def _asker() -> object:
    """Tell the node that is run now from others, and from itself in another backward pass."""
    node = current_node()
    if node is None:
        return None
    return (graph_task(), sequence_number(node)) if numbers_operations() else object()


def _check(home: Tensor, expected: Digest) -> None:
    """Make sure that what was rebuilt is what was saved; see Note [Proof]."""
    if not _comes_to(home, expected, alone=False):
        raise RebuiltWrong(
            "a saved tensor was rebuilt from others, and is not what it was: something that it depends on was changed where "
            "autograd does not see it (under no_grad, or through .data). Leave such a module out (where=...), or rebuild "
            "nothing: kedge.Disk(rebuild=False)"
        )


def _comes_to(value: Tensor, expected: Digest, *, alone: bool) -> bool:
    found = digest(value, alone=alone)
    return found is not None and same(found, expected)
