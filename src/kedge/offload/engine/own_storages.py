"""What is kept anyhow.

# Note [What is kept anyhow]
Parameters, buffers and what the model was called with live as long as the program wants; to move them frees
nothing. They are known by their storages, not by their type: a linear layer saves its weight's transpose. Storages
that parameters have for a while only, as under FSDP, are known by the leaf of the graph that the saved
tensor is, or is a view of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from kedge.sites import leaves
from kedge.torch_internals.storages import identity_of
from kedge.torch_internals.tensors import is_sharded, root_of


class Owned:
    """The storages of parameters, buffers and inputs; see Note [What is kept anyhow].

    Attributes:
        lasting: Whether the parameters' memory lasts from forward to backward: not under FSDP.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.lasting = True
        self._known: dict[int, tuple[str, StorageWeakRef]] = {}  # the reference keeps the number from another storage
        self.look(())

    def look(self, inputs: Any) -> None:
        """Look again, as a forward pass begins: storages may have been replaced."""
        self.lasting = self.lasting and not any(map(is_sharded, self._model.parameters()))
        self._known = {
            identity_of(storage): (why, StorageWeakRef(storage))
            for why, tensors in (
                ("input", (tensor for _, tensor in leaves.find(inputs))),
                ("buffer", self._model.buffers()),
                ("parameter", self._model.parameters()),
            )
            for storage in _storages(tensors)
        }

    def why(self, value: Tensor, number: int) -> str | None:
        """Return why a tensor, on the storage of this number, is kept anyhow; None if it is not."""
        known = self._known.get(number)
        if known is not None:
            return known[0]
        root = root_of(value)
        if root.requires_grad and root.is_leaf:
            return "parameter" if isinstance(root, nn.Parameter) else "input"
        return None


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        if tensor.layout is torch.strided:
            try:
                yield tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # some subclasses have none
                continue
