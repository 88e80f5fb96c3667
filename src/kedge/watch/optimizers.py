"""The program's optimizers: what each holds, how often it has stepped, and whose steps are the run's.

# Note [Whose steps]
With several optimizers, as a GAN has, the one that steps last in each round ends the run's steps: so a step holds
all that belongs to it. A round is over when every optimizer that trains something watched has stepped, or when one
steps again. When the optimizer that ended the steps is gone, or has long been idle, another takes its place.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from kedge.hooks.schedule import AWAITED, Clock, Passes

_PATIENCE = 30
"""How often another optimizer may step before it is taken to be in charge; critics step some 5 times a generator's."""


def params_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters that an optimizer holds; one whose making failed holds none."""
    return (p for group in getattr(optimizer, "param_groups", ()) for p in group["params"])


def any_optimizer() -> bool:
    """Whether the program has made an optimizer: PyTorch marks the `step` of its class when the first one is made."""
    return any(getattr(kind.step, "hooked", False) for kind in _kinds())


def living() -> list[Optimizer]:
    """Return every optimizer that there is; this looks through all objects, so ask seldom."""
    used = [kind for kind in _kinds() if getattr(kind.step, "hooked", False)]
    return [o for o in gc.get_referrers(*used) if isinstance(o, Optimizer)] if used else []


def _kinds() -> list[type[Optimizer]]:
    kinds = [Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return kinds


class Entry:
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
        clock: Counts the run's steps.
        trains: Whether an optimizer holds a parameter that is watched.

    Attributes:
        leading: The one that ends the run's steps; None as long as that is not known.
        entries: Every optimizer that has stepped.
    """

    def __init__(self, clock: Clock, trains: Callable[[Optimizer], bool]) -> None:
        self.clock, self.trains = clock, trains
        self.leading: weakref.ref[Optimizer] | None = None
        self.entries: list[Entry] = []
        self._by_id: dict[int, Entry] = {}
        self._round: list[weakref.ref[Optimizer]] = []
        self._idle = 0
        self._older: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._any, self._known = False, 0
        self._displaced: weakref.ref[Optimizer] | None = None

    def begin(self) -> None:
        """Remember which optimizers there are when watching begins: they may be of a training that is over."""
        self._older = weakref.WeakSet(living() if any_optimizer() else ())

    def entry(self, optimizer: Optimizer) -> Entry:
        """Return what is known of an optimizer that steps; with its first step it becomes known."""
        entry = self._by_id.get(id(optimizer))
        if entry is None or entry.optimizer() is not optimizer:
            entry = self._by_id[id(optimizer)] = Entry(len(self.entries), optimizer, self.clock.step)
            self.entries.append(entry)
        return entry

    def known(self) -> dict[int, Optimizer]:
        """Return the optimizers that have stepped and are still there, by their numbers."""
        return {e.index: optimizer for e in self.entries if (optimizer := e.optimizer()) is not None}

    def leads(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer ends the run's steps."""
        return self.leading is not None and self.leading() is optimizer

    def stepped(self, optimizer: Optimizer) -> bool:
        """Count a step of an optimizer; returns whether it ends a step of the run."""
        self.entry(optimizer).steps += 1
        if self.leads(optimizer):
            self._idle = 0
            return True
        if self.leading is not None:
            return self._takes_over(optimizer)
        return self._closes_round(optimizer)

    def _takes_over(self, optimizer: Optimizer) -> bool:
        """Whether the one that ended the steps is gone or idle, so that this one does from now on.

        One that has not stepped before belongs to another phase of the training if it steps twice in turn - unless the one
        before steps again, which then ends the steps as before.
        """
        if self._displaced is not None and self._displaced() is optimizer:
            self._lead(optimizer)
            return True
        self._idle += 1
        gone = self.leading is not None and self.leading() is None
        others = len(self.known()) - 1
        is_new = self.entry(optimizer).index >= self._known
        patience = 1 if is_new else _PATIENCE * max(others, 1)
        if not gone and (self._idle <= patience or not self.trains(optimizer)):
            return False
        displaced = self.leading if is_new else None
        self._lead(optimizer)
        self._displaced = displaced
        return True

    def _closes_round(self, optimizer: Optimizer) -> bool:
        known = [each for ref in self._round if (each := ref()) is not None]
        if optimizer in known:
            self._lead(known[-1])
            return True
        self._round.append(weakref.ref(optimizer))
        waiting = [o for o in living() if o is not optimizer and o not in known and self.trains(o)]
        if waiting or not self.trains(optimizer):
            return False
        self._lead(optimizer)
        return True

    def _lead(self, optimizer: Optimizer) -> None:
        self.leading, self._idle, self._known = weakref.ref(optimizer), 0, len(self.entries)
        self._displaced = None
        self.clock.optimizer = id(optimizer), 0

    # -- before an optimizer has stepped --------------------------------------------------------------

    def let_passes_lead(self, passes: Passes, module: Callable[[], nn.Module | None]) -> None:
        """Count the forward passes of a model as steps until an optimizer steps.

        Args:
            passes: Its passes.
            module: Returns the model, if it is still there.
        """
        clock = self.clock
        led = clock.step + 1 if clock.led else 0
        clock.lead(passes, lambda: self._is_new() or _is_held(module()))
        clock.looked, clock.awaited = True, 0
        self._any = any_optimizer()
        if self._any:  # looked for only if a second pass comes before it has stepped
            clock.looked, clock.awaited = False, AWAITED
        clock.led = led

    def look_again(self) -> None:
        """Wait for an optimizer that was made after the first pass of the model whose passes are the steps."""
        if not self._any and any_optimizer():
            self._any = True
            self.clock.look()

    def _is_new(self) -> bool:
        """Whether an optimizer was made since watching began."""
        return any(optimizer not in self._older for optimizer in living())


def _is_held(module: nn.Module | None) -> bool:
    """Whether an optimizer holds a parameter of a module, so that it will make the steps."""
    held = {id(p) for p in module.parameters()} if module is not None else set()
    return bool(held) and any(id(p) in held for o in living() for p in params_of(o))
