"""A hook on a leaf tensor, and what keeps it in force when the program swaps the tensor for another.

# Note [Hooks of a swapped leaf]
After a swap autograd calls no hook of the leaf's table; see Note [Swapped tensors] in
`kedge.torch_internals.hook_tables`. For the program everything must be as without Kedge: hooks that
it had before the swap are not called any longer, those that it adds afterwards are.

The hooks of a watch stand in a table of their own, to which autograd alone refers; for the program
the leaf has none. When the program swaps the leaf, or gives it a table by its first hook, autograd
drops Kedge's, which is noticed at once: the hook is registered again. This works only for hooks
after accumulation; before it, autograd drops what the tensor does not refer to.

The hooks of a session can be seen, by `kedge.audit`, too. Before each forward pass those on swapped
leaves move into a table that autograd calls. One with hooks that the program had before the swap
stays as it is; one that had only Kedge's is put in force, with what the program has added since.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from kedge.hooks.placing.installed import InstalledHook
from kedge.torch_internals.hook_tables import (
    after_accumulation,
    content_of,
    hide_table,
    hook_gradient,
    is_called,
    on_tensor,
    put_table,
)
from kedge.torch_internals.own_work import own_work


class LeafHook:
    """One hook on one leaf tensor, which is not held.

    Args:
        tensor: The leaf.
        hook: The callable.
        accumulated: Whether it is called after accumulation, with the leaf; otherwise before it,
            with the gradient.
        find: Returns the leaf, as long as it exists; if given, a hook after accumulation stands in a
            table of its own.

    Attributes:
        content: What the leaf was when the hook was registered; see `content_of`.
        handle: PyTorch's handle of it.
        removed: Whether it was removed.
        parked: Whether it is out of its table for a while.
    """

    __slots__ = (
        "_accumulated",
        "_find",
        "_hook",
        "_table",
        "content",
        "handle",
        "parked",
        "removed",
    )

    def __init__(
        self,
        tensor: Tensor,
        hook: Callable[[Any], Any],
        *,
        accumulated: bool,
        find: Callable[[], Tensor | None] | None = None,
    ) -> None:
        self._hook = hook
        self._accumulated = accumulated
        self._find = find
        self._table: weakref.ref[Any] | None = None
        self.removed = self.parked = False
        self.drop_empty_table(tensor)  # autograd may have forgotten it
        self.handle = self._register(tensor)

    def _register(self, tensor: Tensor) -> RemovableHandle:
        self.content = content_of(tensor)
        if not self._accumulated:
            return hook_gradient(tensor, self._hook)
        is_first = self.table(tensor) is None
        handle: RemovableHandle = tensor.register_post_accumulate_grad_hook(self._hook)
        if self._find is not None:
            self._table = weakref.ref(handle.hooks_dict_ref(), self._dropped)
            if is_first:
                hide_table(tensor)
        return handle

    def _dropped(self, _: object) -> None:
        """Called when nothing refers to the hook's table any longer: registers the hook again.

        The leaf may be getting its next table; see Note [Hooks of a swapped leaf].
        """
        self._table = None
        if sys.is_finalizing() or self._find is None:
            return
        tensor = self._find()
        if tensor is not None and tensor.requires_grad:
            self._point_to(self._register(tensor))

    def _point_to(self, new: RemovableHandle) -> None:
        self.handle.id = new.id
        self.handle.hooks_dict_ref = new.hooks_dict_ref

    def table(self, tensor: Tensor) -> Mapping[int, Any] | None:
        """Return the leaf's table for hooks of this kind; None if it has none."""
        if self._accumulated:
            return after_accumulation(tensor)
        return on_tensor(tensor)

    @property
    def is_in_table(self) -> bool:
        """Whether the hook is in the table that it was registered in.

        A program may clear it.
        """
        return self.handle.id in (self.handle.hooks_dict_ref() or ())

    def was_put_on(self, tensor: Tensor) -> bool:
        """Whether a tensor has the table that the hook was registered in, so that it is no later one at its address."""
        table = self.table(tensor)
        return table is not None and table is self.handle.hooks_dict_ref()

    def renew(self, tensor: Tensor, since: int) -> bool:
        """Move the hook into a table that autograd calls; see Note [Hooks of a swapped leaf].

        Args:
            tensor: The leaf.
            since: The id of the next hook at a time when the leaf had not been swapped yet.

        Returns:
            Whether the leaf was swapped.
        """
        if self.removed:
            return False
        table = self.table(tensor)
        if content_of(tensor) == self.content and is_called(table):
            return False
        handle = self.handle
        before: Any = handle.hooks_dict_ref()
        if self.parked or not tensor.requires_grad or (before and handle.id not in before):
            return False
        self.content = content_of(tensor)
        if table is not None and table is before:
            others = [key for key, hook in table.items() if not _is_own(hook)]
            if any(key < max(since, handle.id) for key in others):
                return True
            if others:
                put_table(tensor, table, accumulated=self._accumulated)
                return True
            # Other hooks of Kedge's that stand in it move on their own.
            put_table(tensor, None, accumulated=self._accumulated)
        if before is not None:
            before.pop(handle.id, None)
        self._point_to(self._register(tensor))
        return True

    def find_table(self, tensor: Tensor) -> None:
        """Make the handle point to the leaf's present table, which it gets if it has none."""
        with own_work():
            now = self.table(tensor)
            if now is not None:
                self.handle.hooks_dict_ref = weakref.ref(now)
            elif tensor.requires_grad:
                new = self._register(tensor)
                table: Any = new.hooks_dict_ref()
                del table[new.id]
                self.handle.hooks_dict_ref = new.hooks_dict_ref

    def remove(self, tensor: Tensor | None) -> None:
        """Remove the hook; a leaf that still exists loses its table if it is empty."""
        self.removed = True
        self._table = None
        self._find = None
        self.handle.remove()
        if tensor is not None:
            self.drop_empty_table(tensor)

    def drop_empty_table(self, tensor: Tensor) -> None:
        """Take the table from a leaf if it is empty.

        The next hook makes one that autograd knows.
        """
        with own_work():
            table = self.table(tensor)
            if table is not None and not table:
                put_table(tensor, None, accumulated=self._accumulated)


class InstalledLeafHook(InstalledHook):
    """A hook of a session on a leaf that the session holds."""

    __slots__ = ("_leaf", "_tensor")

    def __init__(self, leaf: LeafHook, tensor: Tensor) -> None:
        super().__init__(leaf.handle)
        self._leaf = leaf
        self._tensor = tensor

    def take_out(self) -> None:
        """Remove the hook from its table until `put_back`.

        The leaf loses the table if it is empty then.
        """
        self._leaf.parked = True
        super().take_out()
        if self._hook is not None:
            self._leaf.drop_empty_table(self._tensor)

    def put_back(self, cleared: Any = None) -> None:
        """Put the hook back into the leaf's table, which may be another one by now."""
        self._leaf.parked = False
        if self._hook is not None and not self._leaf.removed:
            self._leaf.find_table(self._tensor)
        super().put_back(cleared)

    def remove(self) -> None:
        """Remove the hook for good."""
        super().remove()
        self._leaf.remove(self._tensor)


def next_hook() -> int:
    """Return the id that PyTorch will give to the next hook."""
    return RemovableHandle.next_id


def _is_own(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("kedge.")
