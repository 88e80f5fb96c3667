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
        self._there, self._version = TensorWeakRef(value), version_of(value)

    def __call__(self) -> Tensor | None:
        """Return the tensor; None if it no longer exists."""
        found: Tensor | None = self._there()
        return found

    def unchanged(self) -> Tensor | None:
        """Return the tensor; None if it no longer exists or was written to."""
        found = self()
        return found if found is not None and self._version == version_of(found) >= 0 else None


def arguments_of(owner: Any) -> Sequence[Any]:
    """Return the arguments of a non-reentrant checkpoint whose forward is active on this thread; empty for any other."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _CALLS and frame.f_code.co_filename == checkpoint.__file__:
            within = getattr(frame.f_locals.get("gen"), "gi_frame", None)
            own = {} if within is None else within.f_locals
            return own.get("args", ()) if own.get("new_frame") is owner else ()
        frame = frame.f_back
    return ()


def share_inputs(owner: Any) -> None:
    """Wrap a recompute so that it receives one tensor where the forward did.

    See Note [One tensor in several places].
    """
    if owner in _wrapped:
        return
    _wrapped.add(owner)
    args, first = arguments_of(owner), dict[int, int]()
    if not args:
        return
    source = [
        first.setdefault(id(arg), i) if isinstance(arg, Tensor) else i for i, arg in enumerate(args)
    ]
    notes = {
        i: dict(vars(arg))
        for i, arg in enumerate(args)
        if type(arg) in (Tensor, Parameter) and vars(arg)
    }
    run, own = (
        owner.recompute_fn,
        [(i, SharedInput(arg)) for i, arg in enumerate(args) if isinstance(arg, Tensor)],
    )

    def same(*args: Any) -> Any:
        for i, noted in notes.items():
            vars(args[i]).update(noted)
        now = list(args)
        for i, origin in own:
            if (still := origin.unchanged()) is not None:
                now[i] = still
        return run(*(now[i] for i in source))

    owner.recompute_fn = same
