"""Known storages: those of the model, and those for which this step has a decision.

# Note [Resident tensors]
Parameters, buffers and the model's inputs live as long as the program holds them; moving them frees
nothing. Kedge knows them by their storages, not by their type: a linear layer saves its weight's
transpose. Storages that parameters have for a while only, as under FSDP, are recognised by the leaf
of the graph that the saved tensor is, or is a view of.

# Note [Kept in place]
Tensors kept by reference by choice are known by storage within a step, so that each storage is
decided on once, and counted for as long as it is held. A graph of an earlier step may still be
alive, such as a retained one. A plan, which is for one step, does not include what that graph
holds; this count does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from kedge.offload.held.entry import StorageEntries, StorageEntry
from kedge.offload.held.raw_bytes import EntryKey, own_key
from kedge.offload.held.steps import ModelCall
from kedge.offload.outcomes import OffloadAccount
from kedge.sites import leaves
from kedge.torch_internals.module_tables import parameters_and_buffers
from kedge.torch_internals.storages import identity_of
from kedge.torch_internals.tensors import is_sharded, root_of


class KnownStorages:
    """The storages of the model, those that have an entry, and those that are kept in place.

    Attributes:
        of_model: The storages of parameters, buffers and inputs.
        entries: The live entries.
        kept: The storages that are kept in place in this step.
    """

    def __init__(self, model: nn.Module, entries: StorageEntries, account: OffloadAccount) -> None:
        self.of_model = ModelStorages(model)
        self.entries = entries
        self.kept = KeptInPlace(account)

    def find(self, value: Tensor, number: int) -> StorageEntry | KeptStorage | None:
        """Return the holder of a tensor's bytes, on the storage of this number.

        Returns:
            None if nothing is decided yet.
        """
        entry = self._entry(number, value)
        if entry is None and value.nbytes < value.untyped_storage().nbytes():
            entry = self._entry(own_key(value, number), value)
        if entry is None:
            return self.kept.find(number)
        return entry

    def _entry(self, key: EntryKey, value: Tensor) -> StorageEntry | None:
        ref = self.entries.table.get(key)
        if ref is None:
            return None
        entry = ref()
        if entry is None or not entry.saved.stands_for(value):
            return None
        return entry


class ModelStorages:
    """The storages of parameters, buffers and inputs; see Note [Resident tensors].

    Attributes:
        lasting: Whether the parameters' memory lasts from forward to backward: not under FSDP.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.lasting = True
        # The references keep the numbers from being reused.
        self._known: dict[int, tuple[str, StorageWeakRef]] = {}
        self.update(())

    def update(self, inputs: Any) -> None:
        """Read the storages again at the beginning of a forward pass: some may have been replaced."""
        parameters, buffers = parameters_and_buffers(self._model)
        self.lasting = self.lasting and not any(map(is_sharded, parameters))

        before = self._known
        self._known = {}
        self._learn("input", (tensor for _, tensor in leaves.find(inputs)), before)
        self._learn("buffer", buffers, before)
        self._learn("parameter", parameters, before)

    def _learn(
        self,
        why: str,
        tensors: Iterable[Tensor],
        before: Mapping[int, tuple[str, StorageWeakRef]],
    ) -> None:
        for storage in _storages(tensors):
            number = identity_of(storage)
            known = before.get(number)
            if known is None or known[0] != why:
                known = why, StorageWeakRef(storage)
            self._known[number] = known

    def why(self, value: Tensor, number: int) -> str | None:
        """Return the reason why a tensor, on the storage of this number, stays in any case.

        Returns:
            None if it does not.
        """
        known = self._known.get(number)
        if known is not None:
            return known[0]
        root = root_of(value)
        if root.requires_grad and root.is_leaf:
            return "parameter" if isinstance(root, nn.Parameter) else "input"
        return None


class KeptStorage:
    """A storage kept by choice.

    It lives as long as a tensor saved on it, and counts its bytes in the account.
    """

    __slots__ = ("__weakref__", "_account", "_nbytes")

    def __init__(self, account: OffloadAccount, nbytes: int) -> None:
        self._account, self._nbytes = account, nbytes
        account.stays(nbytes)

    def __del__(self) -> None:
        self._account.stays(-self._nbytes)


@dataclass(slots=True, eq=False)
class KeptReader:
    """The listener of one tensor on a kept storage; see `kedge.hooks.saved.reference.UnpackListener`.

    Attributes:
        call: The call that saved it.
        kept: The storage, which is counted as long as this object lives.
    """

    call: ModelCall
    kept: KeptStorage

    def unpacked(self) -> None:
        """Called when autograd reads the tensor; notifies the call."""
        self.call.unpacked()


class KeptInPlace:
    """The storages of this step that are kept by choice; see Note [Kept in place]."""

    def __init__(self, account: OffloadAccount) -> None:
        self._account = account
        self._known: dict[int, tuple[int, weakref.ref[KeptStorage]]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, nbytes: int, number: int | None) -> KeptStorage:
        """Return a new record of a kept storage; without its number, of one tensor on it only."""
        kept = KeptStorage(self._account, nbytes)
        if number is not None:
            self._known[number] = nbytes, weakref.ref(kept)
        return kept

    def find(self, number: int) -> KeptStorage | None:
        """Return the record that a tensor on a kept storage has to hold.

        Returns:
            None if that storage is not kept by choice.
        """
        known = self._known.get(number)
        if known is None:
            return None
        nbytes, kept = known
        return kept() or self.begin(nbytes, number)

    def forget(self) -> None:
        """Forget all storages, as a step begins."""
        self._known = {}


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        if tensor.layout is torch.strided and not is_lazy(tensor):
            try:
                yield tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # some subclasses have none
                continue
