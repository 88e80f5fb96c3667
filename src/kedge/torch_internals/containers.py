"""Containers that a library has registered with PyTorch, taken apart and put together as it said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kedge.torch_internals.corners import find

_registered: dict[type, Any] = find("torch.utils._pytree:SUPPORTED_NODES") or {}


def is_registered(value: Any) -> bool:
    """Whether a value is such a container."""
    return type(value) in _registered


def apart(value: Any) -> tuple[Sequence[Any], Any]:
    """Return what is in such a container, and what `together` needs besides."""
    children, context = _registered[type(value)].flatten_fn(value)
    return children, context


def together(like: Any, children: Sequence[Any], context: Any) -> Any:
    """Make a container like another one, of other things."""
    return _registered[type(like)].unflatten_fn(children, context)
