"""The scale by which a `torch.amp.GradScaler` multiplies a loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kedge.torch_internals.corners import late

_scale_of = late("torch.amp:GradScaler._get_scale_async", lambda _scaler: None)


def is_scaler(value: Any) -> bool:
    """Whether a value is a `torch.amp.GradScaler`."""
    return isinstance(value, torch.amp.GradScaler)


def scale_of(scaler: Any) -> Tensor | None:
    """Return the present scale, where it is in memory.

    It is None before the first loss, and of a scaler that is switched off.
    """
    if not scaler.is_enabled():
        return None
    scale: Tensor | None = _scale_of(scaler)
    return scale
