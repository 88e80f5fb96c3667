"""Whose steps are counted, where a program has several optimizers one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from kedge.hooks.attach import has_optimizer
from kedge.hooks.schedule import AWAITED, Clock, Passes

_PATIENCE = 30
"""How often one other optimizer may step before it is taken to be in charge; critics step some 5 times a generator's."""
_NO_MODEL = 0
"""What a clock has for the model of an optimizer that holds parameters of none that is watched so far."""


def any_optimizer() -> bool:
    """Whether the program has made an optimizer: PyTorch marks the `step` of its class when the first one is made."""
    kinds = [Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return any(getattr(kind.step, "hooked", False) for kind in kinds)


def _trains(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


class Leader:
    """Lets another optimizer make a clock's steps when the one that made them is gone, or has long been idle.

    Attributes:
        leading: The optimizer that makes the steps, or None as long as none does.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._early = any_optimizer()
        self.leading: weakref.ref[Optimizer] | None = None
        self._idle: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._met: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def lead(self, passes: Passes, module: Callable[[], nn.Module | None]) -> None:
        """Let the passes of a model, the first one or one that comes when that is gone, be the steps until an optimizer's are.

        Args:
            passes: Its passes.
            module: Gives the model, if it is still there.
        """
        led, clock, model = self.clock.step + 1 if self.clock.led else 0, self.clock, module()
        clock.lead(passes, lambda: self.awaits(module()))
        if model is not None and any_optimizer() and _trains(model):
            clock.looked, clock.awaited = (
                False,
                AWAITED,
            )  # to be looked for if a second pass comes before it has stepped
        else:
            clock.look()
        clock.led = led

    def awaits(self, module: nn.Module | None) -> bool:
        """Whether there is an optimizer for a module, which will make the steps.

        One that was made meanwhile, by a program that differentiates the module, is taken to be for it. Only where there
        were some before is it looked for, among all objects.
        """
        if module is None or not any_optimizer():
            return False
        return (_trains(module) and not self._early) or has_optimizer(module)

    def meets(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer steps for the first time."""
        if optimizer in self._met:
            return False
        self._met.add(optimizer)
        return True

    def leads(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer is the one that makes the steps."""
        return self.leading is not None and self.leading() is optimizer

    def led(self) -> None:
        """Hear that the one that makes the steps has made some, of which it was not told."""
        self._idle.clear()

    def count(self, optimizer: Optimizer, *told: Any) -> None:
        """Count an optimizer's step if it makes the steps, or does from now on.

        One that comes when the one before it is gone makes a step even if its model has not been found yet.
        """
        clock, follows = self.clock, self._follows(optimizer)
        for count in clock.counters or ():
            count(optimizer, *told)
        if follows and clock.optimizer is None:
            clock.optimizer = id(optimizer), _NO_MODEL
        if clock.optimizer is None or clock.optimizer[0] != id(optimizer):
            return
        if not self.leads(optimizer):
            self.leading = weakref.ref(optimizer)
            self._idle.clear()
        if clock.optimizer[1] == _NO_MODEL:
            clock.optimized()

    def _follows(self, optimizer: Optimizer) -> bool:
        """Whether the one that made the steps makes no more, seen from the step of another."""
        if self.leading is None or self.leads(optimizer):
            self._idle.clear()
            return False
        idle = self._idle[optimizer] = self._idle.get(optimizer, 0) + 1
        if self.leading() is not None and idle <= _PATIENCE:
            return False
        self.clock.optimizer = None
        return True
