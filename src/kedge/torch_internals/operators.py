"""Operators that compiled code neither removes nor reorders."""

from __future__ import annotations

import torch

from kedge.torch_internals.corners import find


def has_effect(library: torch.library.Library, name: str) -> bool:
    """Register an operator as having an ordered effect; returns whether this PyTorch can."""
    ordered = find("torch._library.effects:EffectType.ORDERED")
    register = getattr(library, "_register_effectful_op", None)
    if ordered is None or register is None:
        return False
    register(name, ordered)
    return True
