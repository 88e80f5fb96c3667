"""The loss as the program means it, where a `torch.amp.GradScaler` has multiplied it before backward.

The loss that backward begins at is then some 65,536 times too large, and jumps whenever the scale
is adapted. A scaler that stands in a variable of the program, or in an attribute of an object that
does, tells its scale, a power of two. It is divided out only if the last operations before backward
multiply by a constant, as `GradScaler.scale` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from kedge.sites.operation_names import plain_name
from kedge.torch_internals.loss_scale import is_scaler, scale_of
from kedge.watch.models.backward_start import BackwardStart

_LAST = 3
"""Most operations before backward in which a multiplication by the scale is looked for."""
_MOST_FRAMES = 12


class LossScaling:
    """Divides a loss by the scale that it was multiplied by."""

    def __init__(self) -> None:
        self._scaler: weakref.ref[Any] | None = None

    @property
    def has_scaler(self) -> bool:
        """Whether a scaler was found."""
        return self._scaler is not None

    def scale(self, began: BackwardStart) -> Tensor | None:
        """Return the scale of the losses that a backward pass began at.

        None if no scaler has scaled them.
        """
        if not began.tensors or not all(map(_ends_in_a_constant_factor, began.tensors)):
            return None
        scaler = None
        if self._scaler is not None:
            scaler = self._scaler()
        if scaler is None:
            scaler = next(_scalers_in(began.frame), None)
            if scaler is None:
                return None
            self._scaler = weakref.ref(scaler)
        return scale_of(scaler)


def unscaled(number: Tensor | float, scale: Tensor) -> Tensor | float:
    """Return a loss without its scale; on a device, nothing waits for it."""
    with torch.no_grad():
        if isinstance(number, Tensor):
            return number / scale.detach().to(number.device)
        return number / float(scale)


def _ends_in_a_constant_factor(loss: Tensor) -> bool:
    node = loss.grad_fn
    for _ in range(_LAST):
        if node is None or plain_name(node.name()) not in ("mul", "div"):
            return False
        makers = [before for before, _ in node.next_functions]
        if plain_name(node.name()) == "mul" and None in makers:
            return True
        node = makers[0]
    return False


def _scalers_in(frame: FrameType | None) -> Iterator[Any]:
    """Yield the scalers in the variables of some frames, and in the attributes of the objects there."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        values = list(frame.f_locals.values())
        yield from filter(is_scaler, values)
        for value in values:
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict and not isinstance(value, type):
                yield from filter(is_scaler, list(attributes.values()))
        frame = frame.f_back
