"""Entries: the bytes that several saved tensors share.

They are moved, compressed or rebuilt, and brought back once at most.

# Note [Identity of saved tensors]
The same storage object at the same version. An address does not identify a storage: it is reused
after the storage is freed. A weak reference to the storage prevents the reuse of its number.

Versions are counted by tensor, not by storage: ``x.data`` and the results of ``set_()`` have their
own counters. So two tensors at the same version other than 0 must also be the same tensor, or views
of one; and their digests must be equal (Note [Digest]): that detects changes that autograd does not
see (``x.data[3] = 0`` between two uses of ``x``).

# Note [Restored bytes]
Restored bytes are shared by weak reference: while a node runs, all its handles read the same ones.
The latest restored bytes are held a moment longer if other handles need them too: autograd's nodes
run one after the other, and each releases its tensors before the next begins. If a node has not,
the next node gets bytes of its own: a node can return its saved tensor as a gradient, which then
becomes ``.grad`` without a copy, because autograd sees no other holder; two gradients must not
share memory. A node on another stream of the device gets bytes of its own, too: it would have to
wait for the first stream, and the memory would have to be kept for both.

# Note [Changed since]
A program can change restored bytes in place: in a Function that works in its saved tensor, or
through a node's ``_saved_self``. An entry never returns changed bytes: the next handle gets the
saved bytes, brought back once more. To detect a change, all tensors that an entry returns on one
storage share one version counter, that of an empty tensor, which takes no memory; autograd gives
the unpacked tensor the counter of the tensor that it received. A change through ``.data`` counts
nowhere and stays undetected, as it does where autograd holds the tensor itself.
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
from kedge.hooks.saved.reference import is_detached, refuse_detached
from kedge.offload.held.handle import Handle
from kedge.offload.held.raw_bytes import Digest, EntryKey, digest, same
from kedge.offload.held.steps import ModelCall
from kedge.offload.outcomes import ModuleAccount
from kedge.torch_internals.accelerators import stream_in_force
from kedge.torch_internals.autograd_nodes import numbers_operations, sequence_number
from kedge.torch_internals.graph_task import current_node, graph_task
from kedge.torch_internals.kernels import negated_alias
from kedge.torch_internals.storages import behind, users_of
from kedge.torch_internals.tensors import changes, root_of


class ByteSource(Protocol):
    """The source that an entry's bytes are brought back from.

    Attributes:
        computed: Whether the bytes are computed, and so may be wrong.
    """

    computed: bool

    @property
    def exact(self) -> bool:
        """Whether the bytes come back to the last bit."""

    def bring(self) -> Tensor:
        """Return a tensor that begins where the entry's bytes begin."""

    def intact(self) -> bool:
        """Whether `bring` can return the bytes that were saved."""

    def prefetch(self) -> None:
        """Begin to bring the bytes back, as they are needed soon; may do nothing."""

    def free(self) -> None:
        """Release the bytes."""


class Restored(NamedTuple):
    """Bytes that were brought back.

    Attributes:
        storage: The storage that has them.
        begin: Their offset in it, in bytes.
        counter: The empty tensor that counts changes of all tensors returned on them; see Note
            [Changed since].
    """

    storage: torch.UntypedStorage
    begin: int
    counter: Tensor

    def alias(self, value: Tensor) -> Tensor:
        """Return an alias of a tensor on these bytes whose changes are counted."""
        counted = self.counter.detach()
        counted.data = value
        return counted


class LastRestored(NamedTuple):
    """The bytes that an entry was restored to last, as far as the entry itself does not hold them.

    Attributes:
        storage: A weak reference to the storage.
        begin: Their offset in it, in bytes.
        counter: The tensor that counts their changes.
        reader: The node that has them.
        stream: The stream of the device that they were brought back on; None without streams.
    """

    storage: StorageWeakRef
    begin: int
    counter: Tensor
    reader: object
    stream: torch.Stream | None


class RecentlyRestored:
    """The entries restored last, held up to a number of bytes; see Note [Restored bytes]."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._last: deque[weakref.ref[StorageEntry]] = deque()

    def hold(self, entry: StorageEntry, home: Tensor) -> None:
        """Keep an entry's restored bytes; drops the oldest ones if there is no room."""
        entry.held = home
        live: list[StorageEntry] = []
        for ref in list(self._last):
            each = ref()
            if each is not None and each is not entry and each.held is not None:
                live.append(each)
        room = self._room - entry.nbytes
        while live and sum(each.nbytes for each in live) > room:
            live.pop(0).held = None
        self._last = deque(each.itself for each in [*live, entry])


class SavedVersion:
    """The storage and version that an entry was made from; see Note [Identity of saved tensors].

    Attributes:
        alone: Whether the entry has the bytes of one tensor only, not of its whole storage.
        digest: The digest of the bytes; None where it cannot be computed.
    """

    __slots__ = ("_root", "_storage", "_version", "alone", "digest")

    def __init__(self, value: Tensor, found: Digest | None, *, alone: bool) -> None:
        self.alone = alone
        self.digest = found
        self._storage = StorageWeakRef(value.untyped_storage())
        self._version = changes(value)
        self._root: weakref.ref[Tensor] | None = None
        if self._version:
            self._root = weakref.ref(root_of(value))

    def stands_for(self, value: Tensor) -> bool:
        """Whether a tensor has these bytes now."""
        if changes(value) != self._version:
            return False
        if self._root is not None and self._root() is not root_of(value):
            return False
        return self.digest is None or self.is_what(value, alone=self.alone)

    def is_what(self, value: Tensor, *, alone: bool) -> bool:
        """Whether the bytes of a tensor have the same digest."""
        found = digest(value, alone=alone)
        return found is not None and self.digest is not None and same(found, self.digest)


class StorageEntry:
    """The bytes of one storage at one version, or of one small part of a large storage.

    Attributes:
        source: The source that they are brought back from.
        saved: The storage and version that they were saved from.
        nbytes: The number of bytes.
        device: The device that they are restored to.
        held: The tensor that they were restored as, as long as it is held; see `RecentlyRestored`.
        itself: A weak reference to the entry.
    """

    __slots__ = (
        "__weakref__",
        "_back",
        "_before",
        "_entries",
        "_key",
        "_reads",
        "_row",
        "device",
        "held",
        "itself",
        "nbytes",
        "saved",
        "source",
    )

    def __init__(
        self,
        entries: StorageEntries,
        key: EntryKey,
        source: ByteSource,
        value: Tensor,
        found: Digest | None,
        row: ModuleAccount,
    ) -> None:
        alone = not isinstance(key, int)
        self.source = source
        self.saved = SavedVersion(value, found, alone=alone)
        self.nbytes = value.nbytes if alone else value.untyped_storage().nbytes()
        self.device = value.device
        self.held: Tensor | None = None
        self.itself = weakref.ref(self)
        self._row = row
        self._entries = entries
        self._key = key
        self._back: LastRestored | None = None
        self._reads = 0
        self._before = entries.latest
        entries.latest = self.itself
        entries.table[key] = self.itself

    def __del__(self) -> None:
        table = self._entries.table
        if table.get(self._key) is self.itself:
            del table[self._key]
        self._row.gone(self.nbytes)
        self.source.free()

    def restore(self) -> Restored:
        """Return the bytes in a storage; see Note [Restored bytes]."""
        reader = _current_reader()
        there = None
        if self._back is not None:
            there = self._still_there(reader)
        if there is None:
            there = self._bring(reader)
        return there

    def _still_there(self, reader: object) -> Restored | None:
        """Return the bytes restored before.

        Returns:
            None if they are freed, changed, or perhaps in use by another node.
        """
        back = self._back
        if back is None:
            return None
        there = behind(back.storage.cdata)
        if (
            there is not None
            and not changes(back.counter)
            and back.stream == stream_in_force(self.device)
        ):
            alone = users_of(there) <= 1 + (self.held is not None)
            if alone or back.reader == reader:
                self._back = back._replace(reader=reader)
                return Restored(there, back.begin, back.counter)
        self._back = self.held = None  # changed bytes are dropped for the saved ones
        return None

    def _bring(self, reader: object) -> Restored:
        begun = time.perf_counter()
        home = self.source.bring()
        if self.source.computed and self.source.exact and self.saved.digest is not None:
            self._check(home)
        self._row.restored(self.nbytes, time.perf_counter() - begun, again=self._reads > 0)
        self._reads += 1
        storage = home.untyped_storage()
        begin = int(home.storage_offset()) * home.itemsize
        counter = torch.empty(0, device=self.device)
        # In one assignment: another thread may read.
        self._back = LastRestored(
            StorageWeakRef(storage), begin, counter, reader, stream_in_force(self.device)
        )
        self._entries.window.hold(self, home)

        if self._before is not None:
            before = self._before()
            if before is not None and before.held is None:
                before.source.prefetch()  # the entry saved before this one is read next
        return Restored(storage, begin, counter)

    def _check(self, home: Tensor) -> None:
        """Raise RebuiltWrong if the rebuilt bytes are not the saved ones.

        See Note [Proof] in `kedge.offload.engine.proof`.
        """
        if not self.saved.is_what(home, alone=False):
            raise RebuiltWrong(
                "a saved tensor was rebuilt from others, and differs from the saved one: "
                "the program changed a tensor that it depends on without autograd noticing "
                "(under no_grad, or through .data). Leave that module out (where=...), "
                "or rebuild nothing: kedge.Disk(rebuild=False)"
            )


class StorageEntries:
    """The live entries, by storage.

    Attributes:
        table: A weak reference to each entry, by its key.
        latest: A weak reference to the newest entry; None before the first.
        window: The entries restored last.
    """

    def __init__(self, window: RecentlyRestored) -> None:
        self.table: dict[EntryKey, weakref.ref[StorageEntry]] = {}
        self.latest: weakref.ref[StorageEntry] | None = None
        self.window = window


class PartOfEntry(Handle):
    """A handle of a tensor whose bytes are an entry's, or a part of them.

    Attributes:
        entry: The entry that holds the bytes. It lives as long as its handles.
        call: The call that saved it, which lives as long as the tensors that it saved.
        made: Whether an operation in a graph made the tensor.
    """

    __slots__ = (
        "_conjugated",
        "_negated",
        "_offset",
        "_origin",
        "call",
        "device",
        "dtype",
        "entry",
        "made",
        "size",
        "stride",
    )
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __init__(self, entry: StorageEntry, value: Tensor, call: ModelCall) -> None:
        self.entry = entry
        self.call = call
        self.made = not value.is_leaf
        self._origin = weakref.ref(value) if self.made else lambda: None
        self.size = value.shape
        self.stride = value.stride()
        self.dtype = value.dtype
        self.device = entry.device
        self._offset = 0 if entry.saved.alone else value.storage_offset()
        self._conjugated = value.is_conj()
        self._negated = value.is_neg()

    @property
    def exact(self) -> bool:
        """Whether `read` returns the saved values to the last bit."""
        return self.entry.source.exact

    def unpack(self) -> Tensor:
        """Return the tensor to the node that saved it.

        See Note [Detached in place] in `kedge.hooks.saved.reference`.
        """
        self.call.unpacked()
        if self.made and is_detached(self._origin):
            refuse_detached(self)
        return self.read()

    def read(self) -> Tensor:
        """Return a tensor on the entry's bytes, which are brought back if they are freed or changed."""
        if torch.is_inference_mode_enabled():  # tensors made in it count no changes
            with torch.inference_mode(mode=False):
                return self.read()
        home = self.entry.restore()
        offset = home.begin // self.dtype.itemsize + self._offset
        value = torch.empty(0, dtype=self.dtype, device=self.device)
        value.set_(home.storage, offset, self.size, self.stride)
        if self._conjugated:
            value = value.conj()
        if self._negated:
            value = negated_alias(value)
        return home.alias(value)

    def intact(self) -> bool:
        """Whether the entry's source can still return the saved bytes."""
        return self.entry.source.intact()


def _current_reader() -> object:
    """Return an identity of the running node in this backward pass; None if no node runs."""
    node = current_node()
    if node is None:
        return None
    if not numbers_operations():
        return object()
    return graph_task(), sequence_number(node)
