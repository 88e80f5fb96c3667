"""The gradients of a program as it trains: there at the end of a backward pass, at a step, and when the next pass begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import monotonic

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
        kept: Whether, at every beginning of a backward pass since the first step, gradients were
            there already. Of several passes a step only the first begins without them.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.reached = 0
        self.lacking = 0
        self.were_there = False
        self._kept: list[bool] = []
        self._began = monotonic()

    @property
    def is_long(self) -> bool:
        """Whether there were so many passes that an optimizer should have stepped."""
        is_late = self.passes > ENOUGH_PASSES and monotonic() - self._began > MOST_SECONDS
        return is_late or self.passes > MOST_PASSES

    @property
    def kept(self) -> bool:
        """See above."""
        return bool(self._kept) and all(self._kept)

    def note_begin(self, stepped: Sequence[Optimizer]) -> None:
        """Note the beginning of a backward pass that adds to the gradients there are."""
        if stepped:
            self._kept.append(any(map(has_gradient, held_by(stepped))))

    def note_end(self, losses: Sequence[LossFacts]) -> None:
        """Note the end of a backward pass."""
        if not self.were_there and losses:
            self.were_there = any(map(has_gradient, losses[-1].reached.values()))

    def note_step(self, optimizer: Optimizer, losses: Sequence[LossFacts]) -> None:
        """Note that an optimizer is about to take its first step."""
        if self.reached:
            return
        for param in held_by([optimizer]):
            if any(id(param) in facts.reached for facts in losses):
                self.reached += 1
                self.lacking += not has_gradient(param)


def held_by(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters of optimizers."""
    return [param for optimizer in optimizers for param in params_of(optimizer)]


def has_gradient(param: Tensor) -> bool:
    """Whether a parameter has a gradient other than zero."""
    if param.grad is None:
        return False
    gradient = param.grad
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return bool(gradient.any())
