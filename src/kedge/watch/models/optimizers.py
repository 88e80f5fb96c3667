"""The program's optimizers: what each holds, how often it has stepped, and whose steps are the run's.

# Note [Whose steps]
With several optimizers, as a GAN has, the one that steps last in each round ends the run's steps: so a step holds
all that belongs to it. A round is over when every optimizer that trains something watched has stepped, or when one
steps again. When the optimizer that ended the steps is gone, or has long been idle, another takes its place. One that
had not stepped before belongs to another phase of the training if it steps twice in turn - unless the one before steps
again, which then ends the steps as before.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from kedge.watch.models.parameters import WatchedParameters

_PATIENCE = 30
"""How often another optimizer may step before it is taken to be in charge; critics step some 5 times a generator's."""


def params_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters that an optimizer holds; one whose making failed holds none."""
    return (p for group in getattr(optimizer, "param_groups", ()) for p in group["params"])


def any_optimizer() -> bool:
    """Whether the program has made an optimizer: PyTorch marks the `step` of its class when the first one is made."""
    return bool(_used_kinds())


def living() -> list[Optimizer]:
    """Return every optimizer that there is; this looks through all objects, so ask seldom."""
    used = _used_kinds()
    return [o for o in gc.get_referrers(*used) if isinstance(o, Optimizer)] if used else []


def _used_kinds() -> list[type[Optimizer]]:
    kinds = [Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [kind for kind in kinds if getattr(kind.step, "hooked", False)]


def _is_held(module: nn.Module | None) -> bool:
    """Whether an optimizer holds a parameter of a module, so that it will make the steps."""
    held = {id(p) for p in module.parameters()} if module is not None else set()
    return bool(held) and any(id(p) in held for o in living() for p in params_of(o))


class KnownOptimizer:
    """One optimizer that has stepped.

    Attributes:
        index: Its number, in the order of first steps.
        optimizer: A reference to it.
        steps: How often it has stepped.
        first_step: The run's step in which it stepped first.
        kind: The name of its class.
        searches: How often it was looked for what of its parameters backward passes reach.
    """

    def __init__(self, index: int, optimizer: Optimizer, first_step: int) -> None:
        self.index, self.optimizer, self.first_step = index, weakref.ref(optimizer), first_step
        self.kind = type(optimizer).__name__
        self.steps = self.parameters = self.searches = 0
        self.rates: list[float] = []
        self.roots: set[int] = set()
        self.size: tuple[int, ...] = ()

    def grew(self, optimizer: Optimizer) -> bool:
        """Whether it holds other parameters than when this was last asked."""
        size = tuple(len(group["params"]) for group in optimizer.param_groups)
        self.parameters, changed, self.size = sum(size), size != self.size, size
        if not self.steps:  # a schedule may end at 0
            self.rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        return changed

    def describe(self) -> dict[str, Any]:
        """Return what the recording says of it at the end."""
        return {
            "index": self.index, "type": self.kind, "steps": self.steps, "parameters": self.parameters,
            "roots": sorted(self.roots), "rates": self.rates, "first_step": self.first_step,
        }  # fmt: skip


class Optimizers:
    """Counts the steps of each optimizer, and knows which one ends the run's; see Note [Whose steps].

    Args:
        places: Knows which parameters are watched.
        step: Returns the run's step under way.

    Attributes:
        leading: The one that ends the run's steps; None as long as that is not known.
        entries: Every optimizer that has stepped.
    """

    def __init__(self, places: WatchedParameters, step: Callable[[], int]) -> None:
        self.places, self.step = places, step
        self.leading: weakref.ref[Optimizer] | None = None
        self.entries: list[KnownOptimizer] = []
        self._by_id: dict[int, KnownOptimizer] = {}
        self._round: list[weakref.ref[Optimizer]] = []
        self._idle = self._known = 0
        self._displaced: weakref.ref[Optimizer] | None = None
        self._older: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def begin(self) -> None:
        """Remember which optimizers there are when watching begins: they may be of a training that is over."""
        self._older = weakref.WeakSet(living())

    def expect(self, module: nn.Module | None) -> bool:
        """Whether an optimizer was made since watching began, or holds a parameter of a module."""
        return any(optimizer not in self._older for optimizer in living()) or _is_held(module)

    def trains(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds a parameter that is watched."""
        return any(self.places.of(param) is not None for param in params_of(optimizer))

    def waiting(self) -> list[Optimizer]:
        """List the optimizers that train something watched, those that have not stepped yet too."""
        return [optimizer for optimizer in living() if self.trains(optimizer)]

    def entry(self, optimizer: Optimizer) -> KnownOptimizer:
        """Return what is known of an optimizer that steps; with its first step it becomes known."""
        entry = self._by_id.get(id(optimizer))
        if entry is None or entry.optimizer() is not optimizer:
            entry = self._by_id[id(optimizer)] = KnownOptimizer(len(self.entries), optimizer, self.step())
            self.entries.append(entry)
        return entry

    def known(self) -> dict[int, Optimizer]:
        """Return the optimizers that have stepped and are still there, by their numbers."""
        return {e.index: optimizer for e in self.entries if (optimizer := e.optimizer()) is not None}

    def stepped(self, optimizer: Optimizer) -> bool:
        """Count a step of an optimizer; returns whether it ends a step of the run."""
        entry = self.entry(optimizer)
        entry.steps += 1
        if self.leading is entry.optimizer:
            self._idle = 0
            return True
        return self._closes_round(optimizer) if self.leading is None else self._takes_over(optimizer)

    def _closes_round(self, optimizer: Optimizer) -> bool:
        known = [each for ref in self._round if (each := ref()) is not None]
        if optimizer in known:
            self._lead(known[-1])
            return True
        self._round.append(weakref.ref(optimizer))
        waiting = [o for o in self.waiting() if o is not optimizer and o not in known]
        if waiting or not self.trains(optimizer):
            return False
        self._lead(optimizer)
        return True

    def _takes_over(self, optimizer: Optimizer) -> bool:
        """Whether the one that ended the steps is gone or idle, or came back, so that this one does from now on."""
        displaced = None
        if self._displaced is None or self._displaced() is not optimizer:
            self._idle += 1
            gone = self.leading is not None and self.leading() is None
            is_new = self.entry(optimizer).index >= self._known
            patience = 1 if is_new else _PATIENCE * max(len(self.known()) - 1, 1)
            if not gone and (self._idle <= patience or not self.trains(optimizer)):
                return False
            displaced = self.leading if is_new else None
        self._lead(optimizer)
        self._displaced = displaced
        return True

    def _lead(self, optimizer: Optimizer) -> None:
        self.leading, self._idle, self._known = self.entry(optimizer).optimizer, 0, len(self.entries)
        self._displaced = None
