"""Optimizers that exist and never step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from kedge.sites.leaves import own_part
from kedge.watch.models.optimizers import params_of

_SMALL = 1 << 16
"""Most elements of a parameter that is compared."""
_COMPARED, _COMPARED_EVERY = 4, 10
"""Most compared parameters, and backward passes between two comparisons."""


class Unstepped:
    """Copies of some parameters of optimizers that have not stepped: the program may change these parameters itself.

    Attributes:
        in_vain: After how many backward passes the parameters were still unchanged; 0 if they have changed.
    """

    def __init__(self) -> None:
        self.in_vain = 0
        self._before: list[tuple[weakref.ref[Tensor], Tensor]] = []

    def count_backward(self, passes: int, unstepped: Iterable[Optimizer]) -> None:
        """Count a backward pass before any optimizer has stepped.

        Args:
            passes: How many backward passes there were.
            unstepped: Optimizers without a step whose parameters are compared from this pass on.
        """
        small = [p for optimizer in unstepped for p in params_of(optimizer) if p.numel() <= _SMALL][:_COMPARED]
        self._before += [(weakref.ref(p), own_part(p).detach().clone()) for p in small]
        if not self._before or passes % _COMPARED_EVERY:
            return
        alive = [(param, before) for ref, before in self._before if (param := ref()) is not None]
        if alive and all(torch.equal(own_part(param).detach(), before) for param, before in alive):
            self.in_vain = passes
        else:
            self._before, self.in_vain = [], 0
