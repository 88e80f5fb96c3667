"""A saved tensor that stays where it is, by reference, with the check that autograd makes without hooks.

# Note [By reference]
Where saved-tensor hooks are in force, PyTorch no longer looks whether a saved tensor was changed in
place before backward needs it. So its version is remembered and compared here, and the error is
autograd's own. What is held is an alias: the tensor itself leads to the graph that holds it.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from kedge.torch_internals.autograd_nodes import SavedTensor, fields, name_in_messages, raw, saved
from kedge.torch_internals.graph_task import current_node
from kedge.torch_internals.tensors import changes

_weak = weakref.ref
_HINT = (
    " Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
    "torch.autograd.set_detect_anomaly(True, check_nan=False)."
)
_FURTHER = (
    " Hint: the backtrace further above shows the operation that failed to compute its gradient. The variable in "
    "question was changed in there or anywhere later. Good luck!"
)


class UnpackListener(Protocol):
    """Who wants to know of a tensor that it left where it is; it lives as long as that is held."""

    def unpacked(self) -> None:
        """Hear that autograd asks for it."""


class KeptByReference:
    """One saved tensor that is kept by reference; see Note [By reference].

    Attributes:
        tensor: An alias of it.
        origin: The tensor itself, weakly: what changed it last is named in the error.
        version: How often its memory had been changed when it was saved; None where PyTorch does not count.
        reader: Who is told when autograd asks for it.
    """

    __slots__ = ("__weakref__", "origin", "reader", "tensor", "version")

    def __init__(self, value: Tensor, reader: UnpackListener | None = None) -> None:
        self.tensor, self.origin, self.reader = value.detach(), _weak(value), reader
        try:
            self.version: int | None = changes(value)
        except RuntimeError:  # inference tensors have no counter
            self.version = None

    def unpack(self) -> Tensor:
        """Return the tensor to autograd; see `read`."""
        if self.reader is not None:
            self.reader.unpacked()
        return self.read()

    def read(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: As autograd does, if its memory was changed since it was saved.
        """
        if self.version is not None and changes(self.tensor) != self.version:
            self._refuse()
        return self.tensor

    def _refuse(self) -> NoReturn:
        value, found, expected = self.tensor, changes(self.tensor), self.version
        self.version = None  # so that the node can be asked for it
        try:
            behind = _behind(self)
        finally:
            self.version = expected
        made = "" if behind is None else f", which is output {behind[1]} of {behind[0]},"
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{value.type()} {list(value.shape)}]{made} is at version {found}; expected version {expected} instead."
            + (_FURTHER if torch.is_anomaly_enabled() else _HINT)
        )


def _behind(kept: KeptByReference) -> tuple[str, int] | None:
    """Name the operation that a tensor comes from, and which of its outputs it is."""
    tensor, now = _saved(kept), kept.origin()
    if now is not None and (tensor is None or tensor.grad_fn is not current_node()):
        tensor = now  # not an output of the node that is run: what changed it last is what it comes from
    if tensor is None or tensor.grad_fn is None:
        return None
    return name_in_messages(tensor.grad_fn), tensor.output_nr


def _saved(kept: KeptByReference) -> Tensor | None:
    """Find it, with its graph, in the node that is being run."""
    node = current_node()
    for name in fields(type(node)) if isinstance(node, Node) else ():
        held = raw(node, name)
        if isinstance(held, SavedTensor) and holds(held.data, kept):
            found: Tensor = saved(node, name)
            return found
        for each in held if isinstance(held, tuple) else ():
            if isinstance(each, SavedTensor) and holds(each.data, kept):
                return _unpacked(each)
    return None


def _unpacked(saved: Any) -> Tensor | None:
    try:
        found: Tensor = saved.unpack()
    except RuntimeError:  # an output that was changed in place cannot be had without its node
        return None
    return found


def holds(packed: Any, kept: KeptByReference) -> bool:
    """Whether what stands in a saved tensor's place is this, or holds this."""
    return packed is kept or getattr(packed, "packed", None) is kept
