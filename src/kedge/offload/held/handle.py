"""Handles: autograd holds one in place of a saved tensor, and reads the tensor from it.

# Note [A changed tensor]
Autograd remembers the version of a saved tensor and refuses to use it after a change in place;
tensors kept by reference here behave the same (`kedge.hooks.saved.reference`). A moved or rebuilt
tensor has the bytes of the time it was saved, whatever happened to the original since: its gradient
is right, and nothing is raised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kedge.hooks.saved.reference import KeptByReference
from kedge.torch_internals.tensors import changes


class Handle(ABC):
    """A handle of one saved tensor."""

    __slots__ = ()

    @property
    @abstractmethod
    def size(self) -> torch.Size:
        """The tensor's shape."""

    @property
    @abstractmethod
    def stride(self) -> tuple[int, ...]:
        """The tensor's strides, in elements."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The tensor's device."""

    @property
    def exact(self) -> bool:
        """Whether `read` returns the saved values to the last bit."""
        return True

    @abstractmethod
    def read(self) -> Tensor:
        """Return the tensor: same values, shape, strides and dtype; without a graph.

        Raises:
            RuntimeError: The tensor is kept by reference, and was changed in place since.
        """

    @abstractmethod
    def intact(self) -> bool:
        """Whether `read` will return the bytes that were saved."""


class HandleByReference(Handle):
    """A handle of a tensor that is kept by reference."""

    __slots__ = ("_kept",)

    def __init__(self, kept: KeptByReference) -> None:
        self._kept = kept

    @property
    def size(self) -> torch.Size:
        """The tensor's shape."""
        return self._kept.tensor.shape

    @property
    def stride(self) -> tuple[int, ...]:
        """The tensor's strides, in elements."""
        return self._kept.tensor.stride()

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self._kept.tensor.dtype

    @property
    def device(self) -> torch.device:
        """The tensor's device."""
        return self._kept.tensor.device

    def read(self) -> Tensor:
        """Return the tensor; see Note [A changed tensor]."""
        return self._kept.read()

    def intact(self) -> bool:
        """Whether the tensor is unchanged since it was saved."""
        kept = self._kept
        return kept.version is not None and changes(kept.tensor) == kept.version
