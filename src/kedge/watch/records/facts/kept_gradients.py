"""Gradients that were not set to zero: those that an optimizer uses still include those of its last step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from kedge import native
from kedge.sites.leaves import own_part
from kedge.store.events import GradsKeptEvent
from kedge.torch_internals import modes
from kedge.torch_internals.tensors import version_of
from kedge.watch.models.backwards import BackwardPasses
from kedge.watch.models.slots import TensorSlot, slots_in

_CHECKED = 8
"""Most gradients of an optimizer that are compared to learn whether they were zeroed."""
_SMALL = 1 << 16
"""Most elements of a gradient that is compared."""

_Gradient: TypeAlias = tuple[TensorSlot, StorageWeakRef, int]
"""A parameter's place, the memory of its gradient, and the version of that memory."""


class KeptGradients:
    """Notes the gradients that are still there when the next step of their optimizer uses them."""

    def __init__(self) -> None:
        self._left: dict[int, list[_Gradient]] = {}
        self._zeroed: set[int] = set()
        self._inside: dict[int, int] = {}
        self._passed = False

    def backward_began(self, step: int, passes: BackwardPasses) -> list[GradsKeptEvent]:
        """Check which gradients of the last step are still there; returns the notes of steps that have begun."""
        notes: list[GradsKeptEvent] = []
        for key, left in list(self._left.items()):
            if not passes.reached_here(_params(left)):
                continue
            if not any(map(_is_left, left)):
                self._zeroed.add(key)
            if key in self._inside:  # its step has begun, and calls this from a closure
                notes += self._notes(step, key, self._inside.pop(key))
        self._passed = True
        return notes

    def backward_ended(self, passes: BackwardPasses) -> None:
        """Remember the current gradients: if a later pass finds them changed, they were zeroed in between."""
        for key, left in self._left.items():
            if key not in self._zeroed and passes.reached_here(_params(left)):
                slots = ((slot, p) for slot, _, _ in left if (p := slot()) is not None)
                self._left[key] = _gradients(slots)

    def before_step(self, step: int, optimizer: Optimizer, index: int) -> list[GradsKeptEvent]:
        """Return a note if the gradients that an optimizer is about to use still include those of its last step."""
        if not self._passed:
            self._inside[id(optimizer)] = index
            return []
        return self._notes(step, id(optimizer), index)

    def _notes(self, step: int, key: int, index: int) -> list[GradsKeptEvent]:
        left, zeroed = self._left.pop(key, None), key in self._zeroed
        self._zeroed.discard(key)
        if not left or zeroed:
            return []
        return [GradsKeptEvent(step=step, optimizer=index, checked=len(left), kept=len(left))]

    def stepped(self, optimizer: Optimizer) -> None:
        """Remember some gradients of an optimizer that has just stepped."""
        self._left[id(optimizer)] = _gradients(slots_in(optimizer))
        self._zeroed.discard(id(optimizer))
        self._inside.pop(id(optimizer), None)
        self._passed = False

    def forget(self) -> None:
        """Forget the gradients: the next step is not measured, so zeroing them would not be seen."""
        self._left.clear()
        self._zeroed.clear()
        self._inside.clear()


def _params(kept: Iterable[_Gradient]) -> list[Tensor]:
    return [param for slot, _, _ in kept if (param := slot()) is not None]


def _gradients(params: Iterable[tuple[TensorSlot, Tensor]]) -> list[_Gradient]:
    """Return some small, dense gradients, each with its parameter and the version of its memory.

    The last parameters come first: they are near the loss, where a gradient is seldom zero.
    """
    nearest = reversed(list(params))
    counted = ((s, g) for s, p in nearest if (g := p.grad) is not None and version_of(g) >= 0)
    dense = (
        (s, g) for s, g in counted if g.layout is torch.strided and g.is_cpu and modes.has_data(g)
    )
    small = ((s, g) for s, g in dense if g.numel() <= _SMALL and _is_some(g))
    return [
        (slot, StorageWeakRef(own_part(g).untyped_storage()), version_of(g))
        for (slot, g), _ in zip(small, range(_CHECKED), strict=False)
    ]


def _is_some(grad: Tensor) -> bool:
    """Whether a gradient has a nonzero element."""
    own = own_part(grad)
    squares, nonfinite = native.all_finite_and_norm([own])
    return bool(squares or nonfinite) or bool(own.any())


def _is_left(one: _Gradient) -> bool:
    """Whether a parameter still has the same gradient, unchanged."""
    slot, memory, version = one
    param = slot()
    grad = None if param is None else param.grad
    if grad is None or grad.layout is not torch.strided or version_of(grad) != version:
        return False
    return modes.has_data(grad) and StorageWeakRef(own_part(grad).untyped_storage()) == memory
