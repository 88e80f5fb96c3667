"""Containers that a library has registered with PyTorch, taken apart and rebuilt by its functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kedge.torch_internals.corners import find

_registered: dict[type, Any] = find("torch.utils._pytree:SUPPORTED_NODES") or {}


def is_registered(value: Any) -> bool:
    """Whether a value is such a container."""
    return type(value) in _registered


def apart(value: Any) -> tuple[Sequence[Any], Any]:
    """Return the children of such a container, and the context that `together` needs."""
    children, context = _registered[type(value)].flatten_fn(value)
    return children, context


def together(like: Any, children: Sequence[Any], context: Any) -> Any:
    """Return a container like another one with other children."""
    return _registered[type(like)].unflatten_fn(children, context)
