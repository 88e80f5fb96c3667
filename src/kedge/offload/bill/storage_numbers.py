"""Numbers of storages: the same for all tensors that share one, and never reused."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from kedge.torch_internals.storages import parts


class StorageNumbers:
    """The numbers of storages in the order of their first use; keeps no storage alive.

    Attributes:
        sizes: The bytes of each, by its number.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the numbers of a tensor's storages: one, several if it consists of several tensors, or none."""
        return tuple(self._number(part.untyped_storage()) for part in parts(tensor))

    def of_all(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """Return the numbers of the storages of several tensors; a lazy parameter has none yet."""
        return frozenset(
            number for tensor in tensors if not is_lazy(tensor) for number in self.of(tensor)
        )

    def held(self, numbers: tuple[int, ...]) -> int:
        """Return the sum of the bytes of some storages."""
        return sum(self.sizes[number] for number in numbers)

    def _number(self, storage: torch.UntypedStorage) -> int:
        number = self._numbers.get(storage)
        if number is None:
            number = self._numbers[storage] = len(self.sizes)
            self.sizes.append(storage.nbytes())
        return number


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is an ordinary one, with one storage and strides."""
    return type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided
