"""Edits: actions that return a new value.

Each takes one tensor and returns one of the same shape, dtype and device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Edit:
    """An edit with a readable name."""

    def __init__(self, name: str, change: Callable[[Tensor], Tensor], *, reshape: bool = False) -> None:
        self.name, self.change, self.reshape = name, change, reshape

    def __call__(self, value: Tensor) -> Tensor:
        """Return the value's replacement."""
        return self.change(value)

    def __repr__(self) -> str:
        """The call that makes this edit."""
        return self.name


def replace(new: Any, *, reshape: bool = False) -> Edit:
    """Return the edit that replaces the value.

    Args:
        new: A tensor, a number that fills the value's shape, or a function of the value.
        reshape: Whether to allow another shape, dtype or device; for forward values only.
    """
    if callable(new) and not isinstance(new, Tensor):
        return Edit(f"replace({getattr(new, '__name__', 'function')})", new, reshape=reshape)
    if isinstance(new, Tensor):
        return Edit("replace(tensor)", lambda value: new, reshape=reshape)
    return Edit(f"replace({new})", lambda value: torch.full_like(value, new), reshape=reshape)


def scale(factor: float | Tensor) -> Edit:
    """Return the edit that multiplies the value by a number, or by a tensor that broadcasts to its shape."""
    return Edit(f"scale({_short(factor)})", lambda value: value * factor)


def add(term: float | Tensor) -> Edit:
    """Return the edit that adds a number, or a tensor that broadcasts to the value's shape, such as a steering vector."""
    return Edit(f"add({_short(term)})", lambda value: value + term)


def clamp(min: float | None = None, max: float | None = None) -> Edit:  # noqa: A002 - torch.clamp's own names
    """Return the edit that limits each element to at least `min` and at most `max`."""
    if min is None and max is None:
        raise ValueError("clamp() without limits changes nothing; pass min, max or both")
    limits = ", ".join(f"{k}={v}" for k, v in (("min", min), ("max", max)) if v is not None)
    return Edit(f"clamp({limits})", lambda value: torch.clamp(value, min=min, max=max))


def zero() -> Edit:
    """Return the edit that replaces the value by zeros: ablation, or a gradient that stops here."""
    return Edit("zero()", torch.zeros_like)


def _short(value: float | Tensor) -> str:
    return f"tensor{list(value.shape)}" if isinstance(value, Tensor) else str(value)
