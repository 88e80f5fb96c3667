"""A saved tensor kept by reference, with the version check that autograd makes without hooks.

# Note [By reference]
While saved-tensor hooks are in force, PyTorch does not check whether a saved tensor was changed in
place before backward needs it. So Kedge stores its version and compares it, and raises autograd's
own error. It holds a leaf itself, as autograd does: a custom function reads the very tensor that it
saved, and the program may replace its ``data``. Of another tensor it holds an alias, because the
tensor itself leads to the graph that holds it.

# Note [Detached in place]
Without hooks, autograd refuses an input of an operation that lost its graph by ``detach_()``, as
long as it holds the very tensor; an output of the operation may lose it. With hooks it does not
look. So Kedge looks at the tensor, if it still exists.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from kedge.sites.leaves import shape_of
from kedge.torch_internals.autograd_nodes import SavedTensor, fields, name_in_messages, raw, saved
from kedge.torch_internals.graph_task import current_node
from kedge.torch_internals.tensors import changes

_weak = weakref.ref
_HINT = (
    " Hint: enable anomaly detection to find the operation that failed to compute "
    "its gradient, with torch.autograd.set_detect_anomaly(True, check_nan=False)."
)
_FURTHER = (
    " Hint: the backtrace further above shows the operation that failed to compute "
    "its gradient. The variable in question was changed in there or anywhere later. "
    "Good luck!"
)
_DETACHED = (
    "Trying to use a saved tensor that has been detached in-place, i.e. with "
    ".detach_().This is not supported, please use out-of-place `.detach()` instead"
)


class UnpackListener(Protocol):
    """Notified when autograd reads a tensor that was kept by reference.

    Lives as long as that reference.
    """

    def unpacked(self) -> None:
        """Called when autograd reads the tensor."""


class KeptByReference:
    """One saved tensor that is kept by reference; see Note [By reference].

    Attributes:
        origin: Returns the tensor itself, if it still exists: the error names the operation that
            changed it last.
        version: The version of its memory when it was saved; None where PyTorch does not count
            versions.
        reader: Notified when autograd reads the tensor; None without one.
        made: Whether an operation in a graph made the tensor.
    """

    __slots__ = ("__weakref__", "_held", "made", "origin", "reader", "version")

    def __init__(self, value: Tensor, reader: UnpackListener | None = None) -> None:
        self.made = not value.is_leaf
        self.reader = reader
        self.origin: Callable[[], Tensor | None]
        if self.made:
            self._held = value.detach()
            self.origin = _weak(value)
        else:  # held itself; a weak reference would keep the program from swapping it
            self._held = value
            self.origin = lambda: value
        try:
            self.version: int | None = changes(value)
        except RuntimeError:  # inference tensors have no counter
            self.version = None

    @property
    def tensor(self) -> Tensor:
        """The tensor, without a graph."""
        return self._held.detach() if self._held.requires_grad else self._held

    def unpack(self) -> Tensor:
        """Notify the reader, and return the tensor; see `read`."""
        if self.reader is not None:
            self.reader.unpacked()
        return self.read()

    def read(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: Autograd's error, if the tensor's memory was changed since it was saved,
                or if it was detached in place.
        """
        if self.made and is_detached(self.origin):
            refuse_detached(self)
        if self.version is not None and changes(self._held) != self.version:
            self._refuse()
        return self.tensor

    def _refuse(self) -> NoReturn:
        value = self._held
        found = changes(value)
        expected = self.version
        self.version = None  # so that the node can read the tensor
        try:
            behind = _behind(self)
        finally:
            self.version = expected

        made = ""
        if behind is not None:
            operation, number = behind
            made = f", which is output {number} of {operation},"
        further = _FURTHER if torch.is_anomaly_enabled() else _HINT
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified "
            f"by an inplace operation: [{value.type()} "
            f"{list(shape_of(value))}]{made} is at version {found}; expected version "
            f"{expected} instead.{further}"
        )


class SavedOfGraph(Protocol):
    """A packed tensor; see Note [Detached in place].

    Attributes:
        made: Whether an operation in a graph made it, and its graph is to be looked for.
    """

    made: bool


def is_detached(origin: Callable[[], Tensor | None]) -> bool:
    """Whether a tensor that an operation made still exists, without its graph."""
    now = origin()
    return now is not None and now.is_leaf


def refuse_detached(packed: SavedOfGraph) -> None:
    """Raise autograd's error if a packed tensor, which lost its graph, is an input of the running node."""
    packed.made = False  # so that the node can read the tensor
    try:
        tensor = _saved(packed)
    finally:
        packed.made = True
    if tensor is not None and tensor.grad_fn is not current_node():
        raise RuntimeError(_DETACHED)


def _behind(kept: KeptByReference) -> tuple[str, int] | None:
    """Return the name of the operation that made a tensor, and the number of its output; None if unknown."""
    tensor = _saved(kept)
    now = kept.origin()
    if now is not None and (tensor is None or tensor.grad_fn is not current_node()):
        # Not an output of the running node: its `grad_fn` is the operation that changed it last.
        tensor = now
    if tensor is None or tensor.grad_fn is None:
        return None
    return name_in_messages(tensor.grad_fn), tensor.output_nr


def _saved(kept: Any) -> Tensor | None:
    """Return a packed tensor, with its graph, from the running node.

    None if it is not there.
    """
    node = current_node()
    if not isinstance(node, Node):
        return None
    for name in fields(type(node)):
        held = raw(node, name)
        if isinstance(held, SavedTensor) and holds(held.data, kept):
            found: Tensor = saved(node, name)
            return found
        if not isinstance(held, tuple):
            continue
        for each in held:
            if isinstance(each, SavedTensor) and holds(each.data, kept):
                return _unpacked(each)
    return None


def _unpacked(saved: Any) -> Tensor | None:
    try:
        found: Tensor = saved.unpack()
    except RuntimeError:  # an output changed in place cannot be unpacked without its node
        return None
    return found


def holds(packed: Any, kept: Any) -> bool:
    """Whether a packed object is a given one, or holds it."""
    return packed is kept or getattr(packed, "packed", None) is kept
