"""The gradients of a program as it trains: there at the end of a backward pass, at a step, and when the next pass begins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic

import torch
from torch import Tensor
from torch.optim import Optimizer

from kedge.examination.loss_facts import LossFacts
from kedge.watch.models.optimizers import params_of

MOST_PASSES = 1000
"""Backward passes after which an optimizer is not waited for any longer."""
ENOUGH_PASSES = 200
MOST_SECONDS = 60.0
"""The same after this many seconds, from `ENOUGH_PASSES` on."""


class Gradients:
    """What was seen of the gradients.

    Attributes:
        passes: How many backward passes began.
        reached: Parameters that a loss depends on, and the first optimizer that stepped holds.
        lacking: Those of them without a gradient other than zero as it was about to step.
        were_there: Whether one of them had such a gradient at the end of a backward pass.
        broken: How many parameters had a gradient that was NaN or infinite as their optimizer took
            its first step.
        pushed: Parameters that the first step of their optimizer has to change: their gradient and
            rate are not zero, and too large to be rounded away.
        scale: The scale by which a `GradScaler` has multiplied the loss; 1 without one.
        norms: The norms of the gradients at the end of the last backward pass, and as the optimizer
            was about to take its first step, of the parameters that it holds; None before.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.reached = 0
        self.lacking = 0
        self.were_there = False
        self.broken = 0
        self.pushed: list[Tensor] = []
        self.scale = 1.0
        self.norms: tuple[float, float] | None = None
        self._at_end: dict[int, float] = {}
        self._kept: dict[int, list[bool]] = {}
        self._began = monotonic()

    @property
    def is_long(self) -> bool:
        """Whether there were so many passes that an optimizer should have stepped."""
        is_late = self.passes > ENOUGH_PASSES and monotonic() - self._began > MOST_SECONDS
        return is_late or self.passes > MOST_PASSES

    def are_kept(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's gradients were there at every beginning of a backward pass since it stepped.

        Of several passes a step only the first begins without them. It has to be asked as the
        optimizer is about to step again: in between another one may be the next to set its own to zero.
        """
        seen = self._kept.get(id(optimizer), [])
        return bool(seen) and all(seen)

    def note_begin(self, stepped: Sequence[Optimizer]) -> None:
        """Note the beginning of a backward pass that adds to the gradients there are."""
        for optimizer in stepped:
            are_there = any(map(has_gradient, held_by([optimizer])))
            self._kept.setdefault(id(optimizer), []).append(are_there)

    def note_end(self, losses: Sequence[LossFacts]) -> None:
        """Note the end of a backward pass."""
        if self.reached or not losses:
            return
        params = losses[-1].reached.values()
        self._at_end.update((id(param), _norm(param)) for param in params)
        self.were_there = self.were_there or any(map(has_gradient, params))

    def note_step(self, optimizer: Optimizer, losses: Sequence[LossFacts]) -> None:
        """Note that an optimizer is about to take its first step."""
        held = held_by([optimizer])
        broken = sum(not math.isfinite(_norm(param)) for param in held)
        self.broken += broken
        if not broken:  # a step that is scaled may be skipped for one of them
            self.pushed += _pushed(optimizer)
        if self.reached:
            return
        reached = [p for p in held if any(id(p) in facts.reached for facts in losses)]
        self.reached = len(reached)
        self.lacking = sum(not has_gradient(param) for param in reached)
        before = math.hypot(*(self._at_end.get(id(param), 0.0) for param in reached))
        self.norms = before / self.scale, math.hypot(*map(_norm, reached))


def held_by(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters of optimizers."""
    return [param for optimizer in optimizers for param in params_of(optimizer)]


def _norm(param: Tensor) -> float:
    """Return the norm of a parameter's gradient; 0 without one."""
    if param.grad is None:
        return 0.0
    gradient = param.grad
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if not gradient.is_complex():
        gradient = gradient.double()  # squares of 16 bits may overflow
    return float(gradient.detach().norm())


def _pushed(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters that a step of an optimizer has to change.

    The first step of Adam and its kind changes elements by the rate, that of SGD by the rate times
    the gradient: a step counts as rounded away if the smaller of both would be.
    """
    for group in optimizer.param_groups:
        rate = float(group.get("lr") or 0.0)
        for param in group["params"]:
            if not has_gradient(param):
                continue
            push = rate * min(float(param.grad.abs().max()), 1.0)
            if push > torch.finfo(param.dtype).eps * float(param.detach().abs().max()):
                yield param


def has_gradient(param: Tensor) -> bool:
    """Whether a parameter has a gradient other than zero."""
    if param.grad is None:
        return False
    gradient = param.grad
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return bool(gradient.any())
