"""Backward passes as long as no optimizer has stepped: those of a training by hand are its steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from kedge.sites.leaves import own_part
from kedge.watch.optimizers import any_optimizer, living, params_of

_COMPARED, _SMALL, _EVERY = 4, 1 << 16, 10
"""How many parameters are compared, of how many elements at most, and after how many passes."""


class ByHand:
    """Counts backward passes, and knows whether they are the steps.

    Args:
        trains: Whether an optimizer holds a parameter that is watched.
        in_training: Whether a model is in training mode.

    Attributes:
        leads: Each backward pass is a step, since no optimizer was made that holds a watched parameter.
        in_vain: After how many passes nothing had changed the parameters of an optimizer that never stepped.
    """

    def __init__(self, trains: Callable[[Optimizer], bool], in_training: Callable[[], bool]) -> None:
        self.trains, self.in_training = trains, in_training
        self.leads, self.in_vain, self._passes = False, 0, 0
        self._held: list[tuple[weakref.ref[Tensor], Tensor]] = []

    def passed(self) -> bool:
        """Count a backward pass; returns whether it ends a step."""
        self._passes += 1
        if not self.leads and self._passes == (2 if any_optimizer() else 1):  # it may be made late
            waiting = [optimizer for optimizer in living() if self.trains(optimizer)]
            self.leads = not waiting
            if self.in_training():
                small = [p for o in waiting for p in params_of(o) if p.numel() <= _SMALL][:_COMPARED]
                self._held = [(weakref.ref(p), own_part(p).detach().clone()) for p in small]
        elif self._held and self._passes % _EVERY == 0:
            kept = [(param, before) for ref, before in self._held if (param := ref()) is not None]
            if kept and all(torch.equal(own_part(param).detach(), before) for param, before in kept):
                self.in_vain = self._passes
            else:  # the program changes them itself
                self._held, self.in_vain = [], 0
        return self.leads
