"""Whose steps are counted, where a program has several optimizers one after the other."""

from __future__ import annotations

import weakref

from torch.optim import Optimizer

from kedge.hooks.schedule import Clock

_PATIENCE = 30
"""How often one other optimizer may step before it is taken to be in charge; critics step some 5 times a generator's."""


def any_optimizer() -> bool:
    """Whether the program has made an optimizer: PyTorch marks the `step` of its class when the first one is made."""
    kinds = [Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return any(getattr(kind.step, "hooked", False) for kind in kinds)


class Leader:
    """Lets another optimizer make a clock's steps when the one that made them is gone, or has long been idle."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._leading: weakref.ref[Optimizer] | None = None
        self._idle: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._met: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def meets(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer steps for the first time."""
        new = optimizer not in self._met
        self._met.add(optimizer)
        return new

    def leads(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer is the one that makes the steps."""
        return self._leading is not None and self._leading() is optimizer

    def led(self) -> None:
        """Hear that the one that makes the steps has made some, of which it was not told."""
        self._idle.clear()

    def follow(self, optimizer: Optimizer) -> None:
        """Take note of an optimizer's step."""
        leading = self._leading() if self._leading is not None else None
        if leading is optimizer or self.clock.optimizer is None:
            self._idle.clear()
        elif self._leading is None:
            self._leading = weakref.ref(optimizer) if self.clock.optimizer[0] == id(optimizer) else None
        else:
            idle = self._idle[optimizer] = self._idle.get(optimizer, 0) + 1
            if leading is None or idle > _PATIENCE:
                self.clock.optimizer, self._leading = None, None
