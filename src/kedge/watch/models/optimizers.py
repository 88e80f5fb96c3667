"""The program's optimizers: their parameters, their steps, and the one that ends the run's steps.

# Note [Whose steps]
With several optimizers, as in a GAN, the one that steps last in each round ends the run's steps: so
a step includes all that belongs to it. A round is over when every optimizer that trains something
watched has stepped, or when one steps again. When the optimizer that ended the steps is deleted, or
long idle, another replaces it. An optimizer that had not stepped before belongs to another phase of
the training if it steps twice in turn - unless the one before steps again, which then ends the
steps as before.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.by_identity import ByIdentity
from kedge.store.events import RecordedOptimizer
from kedge.torch_internals.module_tables import parameters_in
from kedge.watch.models.parameters import WatchedParameters

_PATIENCE = 30
"""Steps after which another optimizer becomes the leading one; critics make some 5 steps for one of a generator."""


def params_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Return the parameters that an optimizer holds; an optimizer whose constructor failed holds none."""
    return (p for group in getattr(optimizer, "param_groups", ()) for p in group["params"])


def any_optimizer() -> bool:
    """Whether the program has made an optimizer: with the first one PyTorch marks the `step` of its class."""
    return bool(_used_kinds())


def living() -> list[Optimizer]:
    """Return every existing optimizer whose parameters can be read.

    Slow: it searches all objects.
    """
    used = _used_kinds()
    found = (o for o in gc.get_referrers(*used) if issubclass(type(o), Optimizer)) if used else ()
    return [optimizer for optimizer in found if _is_readable(optimizer)]


def _is_readable(optimizer: Optimizer) -> bool:
    """Whether an optimizer tells its parameters; the failure of one that does not is reported when it steps."""
    try:
        list(params_of(optimizer))
    except Exception:  # noqa: BLE001 - a property of the program's class
        return False
    return True


def _used_kinds() -> list[type[Optimizer]]:
    kinds = [Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [kind for kind in kinds if getattr(kind.step, "hooked", False)]


def _is_held(module: nn.Module | None) -> bool:
    """Whether an optimizer holds a parameter of a module, so that it will make the steps."""
    held = {id(p) for p in parameters_in(module).values()} if module is not None else set()
    return bool(held) and any(id(p) in held for o in living() for p in params_of(o))


def _kept(rate: Any) -> Any:
    """Return a learning rate as it is now; one that is a tensor is not read, since it may be on a device."""
    return rate.detach().clone() if isinstance(rate, Tensor) else rate


def _finite(rate: Any) -> float | None:
    """Return a learning rate as a number; None for one that is no real number, or not finite."""
    plain = rate.item() if isinstance(rate, Tensor) and rate.numel() == 1 else rate
    return float(plain) if isinstance(plain, (int, float)) and math.isfinite(plain) else None


class KnownOptimizer:
    """An optimizer that has stepped.

    Attributes:
        index: Its number, in the order of first steps.
        optimizer: A weak reference to it.
        steps: How often it has stepped.
        parameters: How many parameters it holds.
        first_step: The run's step in which it stepped first.
        kind: The name of its class.
        searches: How often all its parameters were hooked again, to find those that backward passes
            reach.
        rates: The learning rates of its groups at its first step.
        roots: The numbers of the roots whose parameters it holds.
        size: The number of parameters in each group.
        last: The run's step in which it stepped last; -1 before its first step.
        distance: The number of the run's steps between its last two steps; 0 before its second
            step.
    """

    def __init__(self, index: int, optimizer: Optimizer, first_step: int) -> None:
        self.index, self.optimizer, self.first_step = index, weakref.ref(optimizer), first_step
        self.kind = type(optimizer).__name__
        self.steps = self.parameters = self.searches = 0
        self.rates: list[Any] = []
        self.roots: set[int] = set()
        self.size: tuple[int, ...] = ()
        self.last, self.distance = -1, 0

    def count(self, step: int) -> None:
        """Count a step of it, in this step of the run."""
        self.distance = 0 if self.last < 0 else step - self.last
        self.last = step
        self.steps += 1

    def until_own(self, step: int, every: int) -> int | None:
        """Return the number of the run's steps until it should make its next step whose own number is a multiple.

        Args:
            step: The run's current step.
            every: The number whose multiples count.

        Returns:
            The number; None if it is not known, or if it steps in each step of the run. After its
            first step it may be any of the next `every` ones.
        """
        if self.optimizer() is None or self.distance == 1:
            return None
        if self.steps == 1:
            return 0 if step - self.last <= every else None
        following = self.last + self.distance * (1 + -self.steps % every)
        return following - step if following >= step else None

    def grew(self, optimizer: Optimizer) -> bool:
        """Whether the number of its parameters has changed since the last call."""
        size = tuple(len(group["params"]) for group in optimizer.param_groups)
        self.parameters, changed, self.size = sum(size), size != self.size, size
        if not self.steps:  # a schedule may end at 0
            self.rates = [_kept(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        return changed

    def describe(self) -> RecordedOptimizer:
        """Return its entry in the recording at the end of the run."""
        rates = [rate for rate in map(_finite, self.rates) if rate is not None]
        return RecordedOptimizer(
            index=self.index,
            type=self.kind,
            steps=self.steps,
            parameters=self.parameters,
            roots=tuple(sorted(self.roots)),
            rates=tuple(rates),
            first_step=self.first_step,
        )


class Optimizers:
    """Counts the steps of each optimizer, and decides which one ends the run's; see Note [Whose steps].

    Args:
        places: The watched parameters.
        step: Returns the number of the run's current step.

    Attributes:
        leading: The entry of the optimizer that ends the run's steps; None as long as it is
            unknown.
        entries: Every optimizer that has stepped.
        idle: How often others have stepped since it did.
    """

    def __init__(self, places: WatchedParameters, step: Callable[[], int]) -> None:
        self.places, self.step = places, step
        self.leading: KnownOptimizer | None = None
        self.entries: list[KnownOptimizer] = []
        self._by_id: dict[int, KnownOptimizer] = {}
        self._round: list[weakref.ref[Optimizer]] = []
        self.idle = self._known = 0
        self._displaced: weakref.ref[Optimizer] | None = None
        self._older: ByIdentity[Optimizer, None] = ByIdentity()

    def begin(self) -> None:
        """Remember the optimizers that exist when watching begins: they may belong to a training that is over."""
        self._older.clear()
        self._older.update((optimizer, None) for optimizer in living())

    def expect(self, module: nn.Module | None) -> bool:
        """Whether an optimizer was made since watching began, or holds a parameter of a module."""
        return any(optimizer not in self._older for optimizer in living()) or _is_held(module)

    def trains(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds a watched parameter."""
        return any(self.places.of(param) is not None for param in params_of(optimizer))

    def waiting(self) -> list[Optimizer]:
        """Return the optimizers that train something watched, including those that have not stepped yet."""
        return [optimizer for optimizer in living() if self.trains(optimizer)]

    def entry(self, optimizer: Optimizer) -> KnownOptimizer:
        """Return the entry of an optimizer that steps; made at its first step."""
        entry = self._by_id.get(id(optimizer))
        if entry is None or entry.optimizer() is not optimizer:
            entry = self._by_id[id(optimizer)] = KnownOptimizer(
                len(self.entries), optimizer, self.step()
            )
            self.entries.append(entry)
        return entry

    def known(self) -> dict[int, Optimizer]:
        """Return the optimizers that have stepped and still exist, by their numbers."""
        return {
            e.index: optimizer for e in self.entries if (optimizer := e.optimizer()) is not None
        }

    def stepped(self, optimizer: Optimizer) -> bool:
        """Count a step of an optimizer; returns whether it ends a step of the run."""
        entry = self.entry(optimizer)
        entry.count(self.step())
        if self.leading is entry:
            self.idle = 0
            return True
        return (
            self._closes_round(optimizer) if self.leading is None else self._takes_over(optimizer)
        )

    def until_own(self, step: int, every: int) -> int | None:
        """Return the number of the run's steps until an optimizer that does not end them is measured; None if unknown.

        See Note [Steps of the other optimizers] in `kedge.watch.steps.spacing`.
        """
        others = (entry for entry in self.entries if self.leading is not entry)
        return min(
            (until for each in others if (until := each.until_own(step, every)) is not None),
            default=None,
        )

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
        """Whether this optimizer ends the steps from now on: the leading one is deleted or idle, or this one is back."""
        displaced = None
        if self._displaced is None or self._displaced() is not optimizer:
            self.idle += 1
            gone = self.leading is not None and self.leading.optimizer() is None
            is_new = self.entry(optimizer).index >= self._known
            patience = 1 if is_new else _PATIENCE * max(len(self.known()) - 1, 1)
            if not gone and (self.idle <= patience or not self.trains(optimizer)):
                return False
            displaced = self.leading.optimizer if is_new and self.leading is not None else None
        self._lead(optimizer)
        self._displaced = displaced
        return True

    def _lead(self, optimizer: Optimizer) -> None:
        self.leading, self.idle, self._known = self.entry(optimizer), 0, len(self.entries)
        self._displaced = None
