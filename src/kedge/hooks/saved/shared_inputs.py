"""What was one tensor in a checkpoint's forward is one in its recompute.

# Note [One tensor in several places]
Attention computes otherwise if its query is its key, so what was one tensor in the forward has to be one in the
recompute. A tensor argument is saved once for each place that it has, and comes back from saved-tensor hooks as another
each time, without the attributes that the program has given it. So which of them are one is noted while the forward runs,
and the recompute is given the first of them for all, with its attributes; or the tensor itself, if it is still there as
it was. In containers, what was taken once stands in all
its places. A reentrant checkpoint detaches each of its arguments by itself, so that there they are others in any case.
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
"""What PyTorch calls the function that runs a checkpoint's forward: until 2.13, and since."""
_met: weakref.WeakSet[Any] = weakref.WeakSet()


class SharedInput:
    """A tensor that may be there later on."""

    __slots__ = ("_there", "_version")

    def __init__(self, value: Tensor) -> None:
        self._there, self._version = TensorWeakRef(value), version_of(value)

    def __call__(self) -> Tensor | None:
        """Return it if it is there."""
        found: Tensor | None = self._there()
        return found

    def unchanged(self) -> Tensor | None:
        """Return it if it is there and nothing was written to it."""
        found = self()
        return found if found is not None and self._version == version_of(found) >= 0 else None


def arguments_of(owner: Any) -> Sequence[Any]:
    """Return what a non-reentrant checkpoint was given whose forward is under way on this thread; nothing for another kind."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _CALLS and frame.f_code.co_filename == checkpoint.__file__:
            within = getattr(frame.f_locals.get("gen"), "gi_frame", None)
            own = {} if within is None else within.f_locals
            return own.get("args", ()) if own.get("new_frame") is owner else ()
        frame = frame.f_back
    return ()


def give_one(owner: Any) -> None:
    """Have a recompute be given one tensor where the forward was; see Note [One tensor in several places]."""
    if owner in _met:
        return
    _met.add(owner)
    args, first = arguments_of(owner), dict[int, int]()
    if not args:
        return
    source = [first.setdefault(id(arg), i) if isinstance(arg, Tensor) else i for i, arg in enumerate(args)]
    notes = {i: dict(vars(arg)) for i, arg in enumerate(args) if type(arg) in (Tensor, Parameter) and vars(arg)}
    run, own = owner.recompute_fn, [(i, SharedInput(arg)) for i, arg in enumerate(args) if isinstance(arg, Tensor)]

    def same(*args: Any) -> Any:
        for i, noted in notes.items():
            vars(args[i]).update(noted)
        now = list(args)
        for i, origin in own:
            if (still := origin.unchanged()) is not None:
                now[i] = still
        return run(*(now[i] for i in source))

    owner.recompute_fn = same
