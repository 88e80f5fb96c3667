"""Gradients of views.

# Note [Gradients of views]
When a view, or anything it shares memory with, is changed in place, autograd gives the tensor a
new history that goes around the view's own node: a hook there misses what flows through the
change, or everything. If all of the memory is this view's alone, as of what `nn.Linear` returns
for inputs of three dimensions, the gradient is listened to one node earlier, where nothing can
go around. Otherwise it cannot be had, and a part of it must not be taken for it.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from kedge.torch_internals.autograd_nodes import operation_number, sequence_number
from kedge.torch_internals.tensors import base_of, version_of


class Pulse:
    """Tells whether a tensor's memory was changed in place since, without holding that memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.twin = tensor.detach()
        self.twin.data = tensor.detach().new_empty(0)  # the version counter stays the one they share
        self.version = version_of(self.twin)

    def changed(self) -> bool:
        """Whether it was, or may have been."""
        return self.version < 0 or version_of(self.twin) != self.version


def whole(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a view is all of, if nothing else uses it or ever can; see Note [Gradients of views]."""
    if type(tensor) is not Tensor or not tensor.is_contiguous():
        return None
    base = base_of(tensor)
    if base is None or base.grad_fn is None or not base.is_contiguous() or base.numel() != tensor.numel():
        return None
    if sys.getrefcount(base) > _ALONE:
        return None  # the program holds it too and may use it later
    number, node = operation_number() - 1, tensor.grad_fn
    while node is not None and node is not base.grad_fn:
        if sequence_number(node) != number or len(node.next_functions) != 1:
            return None  # an operation in between may have used it
        number, node = number - 1, node.next_functions[0][0]
    return base if node is not None and sequence_number(node) == number else None


def _references() -> int:
    """The reference count of a tensor that only a view of it holds, as this PyTorch counts."""
    with torch.enable_grad():
        alias = (torch.ones(1, device="cpu", requires_grad=True) * 1).view(1)
    base = base_of(alias)
    return sys.getrefcount(base)


_ALONE = _references()
