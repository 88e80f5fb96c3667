"""Tensors that a checkpoint receives in several places, which stay one tensor in its recompute.

# Note [One tensor in several places]
Attention takes another path if its query is its key, so one tensor in the forward must be one in
the recompute. A checkpoint saves a tensor argument once for each of its places, and saved-tensor
hooks return a different tensor for each, without the attributes that the program has set. So Kedge
records during the forward which arguments are the same, and the recompute receives the first of
them in all places, with its attributes; or the tensor itself, if it still exists unchanged. In
containers, a taken tensor has one placeholder in all its places. A reentrant checkpoint detaches
each of its arguments separately, so there they differ in any case.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils import checkpoint
from torch.utils.weak import TensorWeakRef

from kedge.torch_internals.tensors import version_of

_CALLS = ("checkpoint", "_checkpoint_impl")
"""PyTorch's names for the function that runs a checkpoint's forward: until 2.13, and since."""
_wrapped: weakref.WeakSet[Any] = weakref.WeakSet()


class SharedInput:
    """A weak reference to a tensor, with its version."""

    __slots__ = ("_there", "_version")

    def __init__(self, value: Tensor) -> None:
        self._there = TensorWeakRef(value)
        self._version = version_of(value)

    def __call__(self) -> Tensor | None:
        """Return the tensor; None if it no longer exists."""
        found: Tensor | None = self._there()
        return found

    def unchanged(self) -> Tensor | None:
        """Return the tensor; None if it no longer exists or was written to."""
        found = self()
        if found is None or not self._version == version_of(found) >= 0:
            return None
        return found


def arguments_of(owner: Any) -> Sequence[Any]:
    """Return the arguments of a non-reentrant checkpoint whose forward is active on this thread.

    Empty for any other.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _CALLS and code.co_filename == checkpoint.__file__:
            within = getattr(frame.f_locals.get("gen"), "gi_frame", None)
            if within is None or within.f_locals.get("new_frame") is not owner:
                return ()
            given: Sequence[Any] = within.f_locals.get("args", ())
            return given
        frame = frame.f_back
    return ()


def share_inputs(owner: Any) -> None:
    """Wrap a recompute so that it receives one tensor where the forward did.

    See Note [One tensor in several places].
    """
    if owner in _wrapped:
        return
    _wrapped.add(owner)
    args = arguments_of(owner)
    if not args:
        return

    run = owner.recompute_fn
    first: dict[int, int] = {}
    source = list(range(len(args)))
    own: list[tuple[int, SharedInput]] = []
    notes: dict[int, dict[str, Any]] = {}
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            source[i] = first.setdefault(id(arg), i)
            own.append((i, SharedInput(arg)))
        if type(arg) in (Tensor, Parameter) and vars(arg):
            notes[i] = dict(vars(arg))

    def same(*args: Any) -> Any:
        for i, noted in notes.items():
            vars(args[i]).update(noted)
        now = list(args)
        for i, origin in own:
            still = origin.unchanged()
            if still is not None:
                now[i] = still
        return run(*(now[i] for i in source))

    owner.recompute_fn = same
