"""What stands in for a saved tensor: it is what autograd holds, and gives the tensor when asked.

# Note [A changed tensor]
Autograd remembers the version of what it saves and refuses to use it when it was changed in place
since, and so does what is kept by reference here (`kedge.hooks.saved.reference`). What was moved or is rebuilt
has the bytes of the time it was saved, whatever happened to the tensor since: its gradient is right,
and nothing is raised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kedge.hooks.saved.reference import Kept
from kedge.offload.held.entry import StorageEntry
from kedge.offload.held.steps import ModelCall
from kedge.torch_internals.kernels import negated_alias
from kedge.torch_internals.tensors import changes


class Handle(ABC):
    """Stands for one saved tensor."""

    __slots__ = ()

    @property
    @abstractmethod
    def size(self) -> torch.Size:
        """The tensor's shape."""

    @property
    @abstractmethod
    def stride(self) -> tuple[int, ...]:
        """Its strides."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Its dtype."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Its device."""

    @property
    def exact(self) -> bool:
        """Whether `read` gives it to the last bit."""
        return True

    @abstractmethod
    def read(self) -> Tensor:
        """Return the tensor: same values, shape, strides and dtype; without a graph.

        Raises:
            RuntimeError: It is kept by reference, and was changed in place since.
        """

    @abstractmethod
    def intact(self) -> bool:
        """Whether `read` will return the bytes that were saved."""


class HandleByReference(Handle):
    """Stands for one that is kept by reference."""

    __slots__ = ("_kept",)

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    @property
    def size(self) -> torch.Size:
        """The tensor's shape."""
        return self._kept.tensor.shape

    @property
    def stride(self) -> tuple[int, ...]:
        """Its strides."""
        return self._kept.tensor.stride()

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self._kept.tensor.dtype

    @property
    def device(self) -> torch.device:
        """Its device."""
        return self._kept.tensor.device

    def read(self) -> Tensor:
        """Return the tensor; see Note [A changed tensor]."""
        return self._kept.read()

    def intact(self) -> bool:
        """Whether it was not changed since."""
        return self._kept.version is not None and changes(self._kept.tensor) == self._kept.version


class PartOfEntry(Handle):
    """Stands for a tensor that lies in what an entry holds: all of it, or a part.

    Attributes:
        entry: What holds the bytes. It lasts as long as its handles.
        call: The call that saved it, which lasts as long as what it saved.
    """

    __slots__ = ("_conjugated", "_dtype", "_negated", "_offset", "_size", "_stride", "call", "entry")

    def __init__(self, entry: StorageEntry, value: Tensor, call: ModelCall) -> None:
        self.entry, self.call = entry, call
        self._size, self._stride, self._dtype = value.shape, value.stride(), value.dtype
        self._offset = 0 if entry.saved.alone else value.storage_offset()
        self._conjugated, self._negated = value.is_conj(), value.is_neg()

    @property
    def size(self) -> torch.Size:
        """The tensor's shape."""
        return self._size

    @property
    def stride(self) -> tuple[int, ...]:
        """Its strides."""
        return self._stride

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Its device."""
        return self.entry.device

    @property
    def exact(self) -> bool:
        """Whether `read` gives it to the last bit."""
        return self.entry.source.exact

    def read(self) -> Tensor:
        """Return a tensor on the entry's bytes, which are brought back if they are not there, or were changed."""
        if torch.is_inference_mode_enabled():  # what is made in it counts no changes
            with torch.inference_mode(mode=False):
                return self.read()
        home = self.entry.restore()
        value = torch.empty(0, dtype=self._dtype, device=self.entry.device)
        value.set_(home.storage, home.begin // self._dtype.itemsize + self._offset, self._size, self._stride)
        if self._conjugated:
            value = value.conj()
        return home.give(negated_alias(value) if self._negated else value)

    def intact(self) -> bool:
        """Whether what the bytes are made of is there."""
        return self.entry.source.intact()
