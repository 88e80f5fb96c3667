"""The tensors that autograd saves for backward, by module, without taking part in the saving.

# Note [Whose node]
Autograd numbers its operations in the order in which a thread runs them. The numbers at which a
module's call begins and ends show which nodes of the graph it made; each node belongs to the
innermost call around it. So the graph can be read when the forward pass is over. A saved-tensor
hook would see the same while it happens, but it breaks transforms of `torch.func`, switches off
checks for in-place changes, and replaces the hooks of the program.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from kedge.sites import leaves
from kedge.store.saved_account import Sums
from kedge.torch_internals.autograd_nodes import (
    SavedTensor,
    behind,
    is_number,
    operation_number,
    saved_by,
    sequence_number,
)
from kedge.torch_internals.checkpoint import frame_of
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.saved_hooks import top_hooks
from kedge.torch_internals.storages import identity_of, owned, storages


class SavedByModule:
    """Counts what autograd has saved for the backward passes of one step, by the module that saved it.

    It follows the module calls of the step, and counts when the call of a root module is over. Each
    storage counts once, as a whole, for the first module that saved it; parameters and buffers do
    not count. Nothing is kept alive.

    If the program's own saved-tensor hooks replace a tensor, their value counts as far as it is a
    tensor, or a list or tuple of tensors. Values that a `torch.autograd.Function` keeps on its
    ``ctx`` count too.

    Not seen are values that no output of the root depends on, values that an in-place change of a
    view saved (PyTorch does not show the inside of its ``CopySlices`` node), values that functions
    written in C++ save by themselves, and values computed after the last module, such as a
    functional loss.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._from: list[int] = []
        self._inner: list[str | None] = []
        self._since = operation_number()
        self._callers: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
        self._frames: weakref.WeakSet[Any] = weakref.WeakSet()
        self._counted: dict[int, StorageWeakRef] = {}
        self._modules: dict[str | None, list[int]] = {}

    def begin(self, path: str, around: str | None) -> None:
        """Note that a module's call begins.

        Args:
            path: The module.
            around: The module of the innermost call around it; None if there is none.
        """
        if self._is_elsewhere():
            return
        hooks = top_hooks(True)
        if hooks is not None and (frame := frame_of(hooks[0])) is not None:
            self._callers.setdefault(frame, around)
        self._mark(path)

    def end(self, around: str | None) -> None:
        """Note that a module's call has ended.

        Args:
            around: The module of the innermost call around it; None if there is none.
        """
        if not self._is_elsewhere():
            self._mark(around)

    def account(self, outputs: Any, root: nn.Module) -> list[Sums]:
        """Count the values saved since the last call of this method.

        To be called when a root module has returned.

        Args:
            outputs: The outputs of the root.
            root: The module; its parameters and buffers are left out.

        Returns:
            For all of the step so far, in the order of execution, each module that saved something:
            ``path``, ``bytes`` and ``tensors``. The path is None for work between root modules.
        """
        with torch.no_grad():
            own = owned(root)
            for path, tensor in self._saved(outputs):
                for number, storage in storages([tensor]).items():
                    if number not in own and number not in self._counted:
                        self._add(path, storage)
        self._since = operation_number()
        return [Sums(path=path, tensors=n, bytes=size) for path, (size, n) in self._modules.items()]

    def _is_elsewhere(self) -> bool:
        """Whether this is a recompute, or a thread with a numbering of its own."""
        return in_backward() or threading.get_ident() != self._thread

    def _mark(self, innermost: str | None) -> None:
        self._from.append(operation_number())
        self._inner.append(innermost)

    def _maker(self, number: int) -> str | None:
        """Return the path of the module that made a node, by the number of the node."""
        at = bisect_right(self._from, number) - 1
        if at < 0:
            return None
        return self._inner[at]

    def _add(self, path: str | None, storage: torch.UntypedStorage) -> None:
        # As long as the weak reference exists, no other storage gets this identity.
        self._counted[identity_of(storage)] = StorageWeakRef(storage)
        if storage.nbytes():
            sums = self._modules.setdefault(path, [0, 0])
            sums[0] += storage.nbytes()
            sums[1] += 1

    def _saved(self, outputs: Any) -> Iterator[tuple[str | None, Tensor]]:
        """Yield each saved tensor with the module that saved it, in the order of execution."""
        for number, node in self._nodes(outputs):
            path = self._maker(number)
            for kept in self._kept(node):
                yield from self._unfolded(kept, path)

    def _kept(self, node: Node) -> Iterator[Any]:
        """Yield the values that a node holds for its backward; nothing if that has freed them."""
        yield from (saved for _, saved in saved_by(node))
        yield from getattr(node, "__dict__", {}).values()

    def _unfolded(self, kept: Any, path: str | None) -> Iterator[tuple[str | None, Tensor]]:
        """Yield the tensors in a held value; see Note [Reading without unpacking]."""
        value = kept
        if isinstance(kept, SavedTensor):
            value = kept.data
            frame = frame_of(kept.unpack_hook)
            if frame is not None and frame not in self._frames:
                # A checkpoint, which keeps the arguments of its block.
                self._frames.add(frame)
                for each in getattr(frame, "saved_args", ()):
                    yield from self._unfolded(each, self._callers.get(frame, path))
        if not isinstance(value, (list, tuple)):
            value = (value,)
        for tensor in value:
            if isinstance(tensor, Tensor) and not is_number(tensor):
                yield path, tensor

    def _nodes(self, outputs: Any) -> list[tuple[int, Node]]:
        """Return the nodes behind the outputs that are not counted yet, in the order of execution."""
        made_by = (tensor.grad_fn for _, tensor in leaves.find(outputs))
        found = [(sequence_number(node), node) for node in behind(made_by, self._since)]
        return sorted(found, key=lambda pair: pair[0])


untraced(SavedByModule.begin, SavedByModule.end, SavedByModule.account)
