"""The program's stance on compiling: Kedge's hooks keep to existing code where it allows no more.

# Note [Where nothing may be compiled]
Under `torch.compiler.set_stance("fail_on_recompile")` a call without compiled code for it raises an
error, and under ``"eager_on_recompile"`` it runs uncompiled. A program sets that after its warm-up,
at any moment. If Kedge has put hooks in or taken them out meanwhile, the code that exists may be
that with the other hooks.

PyTorch calls one function right before compiled code runs, which translates the stance. Kedge
replaces it while it watches. There it chooses the hooks for which there is code. If a call has no
code even so, Kedge tries the other hooks: if there is code for these, the error would be Kedge's
doing. Then this one call runs uncompiled, and the other hooks stay. If not, PyTorch's error is
raised as without Kedge.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from kedge.torch_internals.corners import COMPILER, find

_TRANSLATES = "_callback_from_stance"
_REFUSING = ("fail_on_recompile", "eager_on_recompile")


class Variants(Protocol):
    """The hooks that are in compiled code or not; see Note [Where nothing may be compiled]."""

    def settle(self) -> None:
        """Choose hooks for which there is code."""

    def try_other(self, has_code: Callable[[], bool]) -> bool:
        """Choose the other hooks, if there is code for these; returns whether there is."""


_followers: list[Variants] = []
_replaced: list[tuple[Any, Any]] = []
"""PyTorch's function and Kedge's in its place, while there are followers."""


def stance() -> str:
    """Return the program's stance on compiling; "default" as long as nothing can have been compiled."""
    return getattr(getattr(sys.modules.get(COMPILER), "_stance", None), "stance", "default")


def is_refusing() -> bool:
    """Whether the program allows no more compiling now."""
    return stance() in _REFUSING


def follow_stance(variants: Variants) -> None:
    """Notify of each call of compiled code while the program allows no more compiling.

    A second time does nothing. On a PyTorch without the function that translates the stance nothing
    is notified.
    """
    compiler: Any = sys.modules.get(COMPILER)
    theirs = getattr(compiler, _TRANSLATES, None)
    if variants in _followers or theirs is None:
        return
    _followers.append(variants)
    if not _replaced:
        ours = partial(_translate, theirs)
        _replaced.append((theirs, ours))
        setattr(compiler, _TRANSLATES, ours)


def unfollow_stance(variants: Variants) -> None:
    """End the notifications; the last one to end them restores PyTorch's function."""
    if variants not in _followers:
        return
    _followers.remove(variants)
    if not _followers:
        compiler: Any = sys.modules.get(COMPILER)
        ((theirs, ours),) = _replaced
        _replaced.clear()
        if getattr(compiler, _TRANSLATES, None) is ours:
            setattr(compiler, _TRANSLATES, theirs)


def _translate(theirs: Callable[[Any], Any], callback: Any) -> Any:
    """Return the function that PyTorch's would return, which Dynamo calls for a frame without code."""
    made = theirs(callback)
    if callback in (None, False) or not is_refusing():
        return made
    for variants in _followers:
        variants.settle()
    if not callable(made):
        return made
    refuse = partial(_refuse, made)
    refuse._torchdynamo_orig_backend = getattr(made, "_torchdynamo_orig_backend", callback)  # type: ignore[attr-defined]
    return refuse


def _refuse(theirs: Callable[..., Any], frame: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse to compile a frame as PyTorch does, unless there is code for it with other hooks."""
    has_code = partial(_has_code, frame)
    if not has_code() and any(variants.try_other(has_code) for variants in _followers):
        return _uncompiled()
    return theirs(frame, *args, **kwargs)


def _has_code(frame: Any) -> bool:
    """Whether there is compiled code for a frame with the present hooks."""
    entries: Any = find("torch:_C._dynamo.eval_frame._debug_get_cache_entry_list")
    if entries is None:
        return False
    return any(entry.guard_manager.check(frame.f_locals) for entry in entries(frame.f_code))


def _uncompiled() -> Any:
    """Return what has Dynamo run a frame, and all that it calls, without compiling, this one time."""
    types: Any = sys.modules["torch._dynamo.types"]
    skip = types.FrameAction.SKIP
    return types.ConvertFrameReturn(
        frame_exec_strategy=types.FrameExecStrategy(skip, skip), apply_to_code=False
    )
