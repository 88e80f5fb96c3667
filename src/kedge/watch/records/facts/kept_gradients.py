"""Gradients that were not set to zero, so that an optimizer uses those of its last step, too."""

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

CHECKED = 8
"""Most gradients of an optimizer that are compared to learn whether they were zeroed."""
_SMALL = 1 << 16
"""Most elements of a gradient that is compared."""

KeptGradient: TypeAlias = tuple[TensorSlot, StorageWeakRef, int]
"""A parameter's place, the memory of its gradient, and the version of that memory."""


class KeptGradients:
    """Notes the gradients that are still there when the next step of their optimizer uses them."""

    def __init__(self) -> None:
        self._left: dict[int, list[KeptGradient]] = {}
        self._zeroed: set[int] = set()
        self._inside: dict[int, int] = {}
        self._passed = False

    def backward_began(self, step: int, passes: BackwardPasses) -> list[GradsKeptEvent]:
        """Check which gradients of the last step are still there.

        Returns the notes of steps that have begun.
        """
        notes: list[GradsKeptEvent] = []
        for key, left in list(self._left.items()):
            if not passes.reached_here(_params(left)):
                continue
            if not any(map(is_left, left)):
                self._zeroed.add(key)
            if key in self._inside:  # its step has begun, and calls this from a closure
                notes += self._notes(step, key, self._inside.pop(key))
        self._passed = True
        return notes

    def backward_ended(self, passes: BackwardPasses) -> None:
        """Remember the current gradients.

        If a later pass finds them changed, they were zeroed in between.
        """
        for key, left in self._left.items():
            if key not in self._zeroed and passes.reached_here(_params(left)):
                living = [(slot, p) for slot, _, _ in left if (p := slot()) is not None]
                self._left[key] = _gradients(living)

    def before_step(self, step: int, optimizer: Optimizer, index: int) -> list[GradsKeptEvent]:
        """Return a note if an optimizer is about to use gradients of its last step, too."""
        if not self._passed:
            self._inside[id(optimizer)] = index
            return []
        return self._notes(step, id(optimizer), index)

    def _notes(self, step: int, key: int, index: int) -> list[GradsKeptEvent]:
        left = self._left.pop(key, None)
        if key in self._zeroed:
            self._zeroed.remove(key)
            return []
        if not left:
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


def _params(kept: Iterable[KeptGradient]) -> list[Tensor]:
    return [param for slot, _, _ in kept if (param := slot()) is not None]


def _gradients(params: Iterable[tuple[TensorSlot, Tensor]]) -> list[KeptGradient]:
    """Return some small, dense gradients, each with its parameter and the version of its memory.

    The last parameters come first: they are near the loss, where a gradient is seldom zero.
    """
    found: list[KeptGradient] = []
    for slot, param in reversed(list(params)):
        grad = param.grad
        if grad is not None and can_compare(grad):
            found.append(gradient_at(slot, grad))
            if len(found) == CHECKED:
                break
    return found


def gradient_at(slot: TensorSlot, grad: Tensor) -> KeptGradient:
    """Return a parameter's place with the present state of its gradient, which is not read."""
    memory = StorageWeakRef(own_part(grad).untyped_storage())
    return slot, memory, version_of(grad)


def can_compare(grad: Tensor) -> bool:
    """Whether a gradient is small and dense, has a version, and has a nonzero element."""
    if grad.layout is not torch.strided or not grad.is_cpu or grad.numel() > _SMALL:
        return False
    if version_of(grad) < 0 or not modes.has_data(grad):
        return False
    own = own_part(grad)
    squares, nonfinite = native.all_finite_and_norm([own])
    return bool(squares or nonfinite) or bool(own.any())


def is_left(one: KeptGradient) -> bool:
    """Whether a parameter still has the same gradient, unchanged."""
    slot, memory, version = one
    param = slot()
    if param is None or param.grad is None:
        return False
    grad = param.grad
    if grad.layout is not torch.strided or version_of(grad) != version:
        return False
    return modes.has_data(grad) and StorageWeakRef(own_part(grad).untyped_storage()) == memory
