"""Gradients of views.

# Note [Gradients of views]
When a view, or a tensor that shares memory with it, is changed in place, autograd gives the tensor
a new history that bypasses the view's own node: a hook there misses the gradient through the
change, or all of it. If the view alone uses all of the memory, like the output of `nn.Linear`
for inputs of three dimensions, Kedge reads the gradient one node earlier, which no history
bypasses. Otherwise the gradient is not available, and a part of it must not count as all of it.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from kedge.torch_internals.autograd_nodes import operation_number, sequence_number
from kedge.torch_internals.tensors import base_of, version_of


class MemoryVersion:
    """The version of a tensor's memory, to notice changes in place without holding that memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.twin = tensor.detach()
        self.twin.data = tensor.detach().new_empty(0)  # both still share the version counter
        self.version = version_of(self.twin)

    def changed(self) -> bool:
        """Whether the memory was changed since, or may have been."""
        return self.version < 0 or version_of(self.twin) != self.version


def whole(tensor: Tensor) -> Tensor | None:
    """Return the base that a view covers, if nothing else uses it or ever can.

    See Note [Gradients of views].
    """
    if type(tensor) is not Tensor or not tensor.is_contiguous():
        return None
    base = base_of(tensor)
    if base is None or base.grad_fn is None:
        return None
    if not base.is_contiguous() or base.numel() != tensor.numel():
        return None
    if sys.getrefcount(base) > _ALONE:
        return None  # the program holds it too and may use it later
    number = operation_number() - 1
    node = tensor.grad_fn
    while node is not None and node is not base.grad_fn:
        if sequence_number(node) != number or len(node.next_functions) != 1:
            return None  # an operation in between may have used it
        number -= 1
        node = node.next_functions[0][0]
    if node is None or sequence_number(node) != number:
        return None
    return base


def _references() -> int:
    """The reference count of a tensor that only a view of it holds, as this PyTorch counts."""
    with torch.enable_grad():
        alias = (torch.ones(1, device="cpu", requires_grad=True) * 1).view(1)
    base = base_of(alias)
    return sys.getrefcount(base)


_ALONE = _references()
