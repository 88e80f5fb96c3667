"""The stack of pairs of saved-tensor hooks that each thread has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kedge.torch_internals.corners import at_once, lacks, late

_AUTOGRAD = "torch:_C._autograd."
_CANNOT = "this PyTorch does not show a thread's saved-tensor hooks, or when a tensor was changed"


def _nothing(*_: Any) -> None:
    return None


top_hooks: Callable[[bool], Any] = at_once(f"{_AUTOGRAD}_top_saved_tensors_default_hooks", _nothing)
"""The innermost pair; None if there is none."""

push: Callable[[Any, Any], None] = late(f"{_AUTOGRAD}_push_saved_tensors_default_hooks", _nothing)
pop: Callable[[], None] = late(f"{_AUTOGRAD}_pop_saved_tensors_default_hooks", _nothing)

_why: Callable[[], str | None] = late(
    f"{_AUTOGRAD}_saved_tensors_hooks_get_disabled_error_message", _nothing
)
_enable: Callable[[], None] = late(f"{_AUTOGRAD}_saved_tensors_hooks_enable", _nothing)
_disable: Callable[[str, bool], None] = late(f"{_AUTOGRAD}_saved_tensors_hooks_disable", _nothing)


def _useless() -> bool:
    """Whether Kedge cannot notice changes of packed tensors, or other users of their memory."""
    return lacks("saved_hooks", "versions", "storages")


def disabled() -> str | None:
    """Return why no pair may be active on this thread, in the words of `torch.func`, if none may."""
    if _useless():
        return _CANNOT
    return _why()


def enable() -> None:
    """Allow pairs on this thread again."""
    if not _useless():
        _enable()


def disable(why: str, nested: bool) -> None:
    """Forbid pairs on this thread."""
    if not _useless():
        _disable(why, nested)
