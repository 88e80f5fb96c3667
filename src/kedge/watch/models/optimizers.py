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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.by_identity import ByIdentity
from kedge.store.events import RecordedOptimizer
from kedge.torch_internals.module_tables import parameters_in
from kedge.watch.models.parameters import WatchedParameters

_PATIENCE = 30
"""Steps after which another optimizer becomes the leading one.

Critics make some 5 steps for one of a generator.
"""


_BY_HAND = "updates by hand"
"""The type of what has no class."""


def params_of(optimizer: object) -> Iterator[nn.Parameter]:
    """Yield the parameters that an optimizer holds; one whose constructor failed holds none."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def any_optimizer() -> bool:
    """Whether the program has made an optimizer.

    With the first one PyTorch marks the `step` of its class.
    """
    return bool(_used_kinds())


def living() -> list[Optimizer]:
    """Return every existing optimizer whose parameters can be read.

    Slow: it searches all objects.
    """
    used = _used_kinds()
    if not used:
        return []
    found = (each for each in gc.get_referrers(*used) if issubclass(type(each), Optimizer))
    return [optimizer for optimizer in found if _is_readable(optimizer)]


def _is_readable(optimizer: Optimizer) -> bool:
    """Whether an optimizer tells its parameters.

    The failure of one that does not is reported when it steps.
    """
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
    if module is None:
        return False
    held = {id(p) for p in parameters_in(module).values()}
    return bool(held) and any(id(p) in held for o in living() for p in params_of(o))


def rates_now(optimizer: Optimizer) -> tuple[float | None, ...]:
    """Return the learning rate of each group of an optimizer as it is now.

    None for one that is no number, or that is on a device: reading it would wait.
    """
    found = []
    for group in getattr(optimizer, "param_groups", ()):
        rate = group.get("lr")
        is_away = isinstance(rate, Tensor) and not rate.is_cpu
        found.append(None if is_away else _finite(rate))
    return tuple(found)


def group_names(optimizer: Optimizer) -> tuple[str | None, ...]:
    """Return the ``name`` of each group of an optimizer; empty if the program names none of them."""
    found = [group.get("name") for group in getattr(optimizer, "param_groups", ())]
    names = [name if isinstance(name, str) else None for name in found]
    if not any(names):
        return ()
    return tuple(names)


def _kept(rate: Any) -> Any:
    """Return a learning rate as it is now.

    One that is a tensor is not read, since it may be on a device.
    """
    if isinstance(rate, Tensor):
        return rate.detach().clone()
    return rate


def _finite(rate: Any) -> float | None:
    """Return a learning rate as a number; None for one that is no real number, or not finite."""
    if isinstance(rate, Tensor) and rate.numel() == 1:
        rate = rate.item()
    if isinstance(rate, (int, float)) and math.isfinite(rate):
        return float(rate)
    return None


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
        self.index = index
        self.optimizer = weakref.ref(optimizer)
        self.first_step = first_step
        self.kind = type(optimizer).__name__
        self.steps = self.parameters = self.searches = 0
        self.rates: list[Any] = []
        self.roots: set[int] = set()
        self.size: tuple[int, ...] = ()
        self.last = -1
        self.distance = 0

    def count(self, step: int) -> None:
        """Count a step of it, in this step of the run."""
        if self.last >= 0:
            self.distance = step - self.last
        self.last = step
        self.steps += 1

    def until_own(self, step: int, every: int) -> int | None:
        """Return how many steps of the run it takes to its next step whose number is a multiple.

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
            following = step
            is_over = step - self.last > every
        else:
            following = self.last + self.distance * (1 + -self.steps % every)
            is_over = following < step
        return None if is_over else following - step

    def grew(self, optimizer: Optimizer) -> bool:
        """Whether the number of its parameters has changed since the last call."""
        groups = optimizer.param_groups
        before = self.size
        self.size = tuple(len(group["params"]) for group in groups)
        self.parameters = sum(self.size)
        if not self.steps:  # a schedule may end at 0
            self.rates = [_kept(group["lr"]) for group in groups if "lr" in group]
        return self.size != before

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


class TrainedByHand:
    """A root whose parameters change without an optimizer.

    Attributes:
        index: Its number among the optimizers.
        root: The number of the root.
        first_step: The run's step in which a change was seen first.
        parameters: How many parameters were seen to change.
        steps: In how many measured steps they changed.
    """

    def __init__(self, index: int, root: int, first_step: int) -> None:
        self.index = index
        self.root = root
        self.first_step = first_step
        self.parameters = self.steps = 0

    def describe(self) -> RecordedOptimizer:
        """Return its entry in the recording at the end of the run."""
        return RecordedOptimizer(
            index=self.index,
            type=_BY_HAND,
            steps=self.steps,
            parameters=self.parameters,
            roots=(self.root,),
            first_step=self.first_step,
            by_hand=True,
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
        by_hand: The roots that the program trains without one.
        idle: How often others have stepped since it did.
    """

    def __init__(self, places: WatchedParameters, step: Callable[[], int]) -> None:
        self.places = places
        self.step = step
        self.leading: KnownOptimizer | None = None
        self.entries: list[KnownOptimizer] = []
        self.by_hand: list[TrainedByHand] = []
        self._by_id: dict[int, KnownOptimizer] = {}
        self._round: list[weakref.ref[Optimizer]] = []
        self.idle = self._known = 0
        self._displaced: weakref.ref[Optimizer] | None = None
        self._older: ByIdentity[Optimizer, None] = ByIdentity()

    def begin(self) -> None:
        """Remember the optimizers that exist when watching begins.

        They may belong to a training that is over.
        """
        self._older.clear()
        self._older.update((optimizer, None) for optimizer in living())

    def expect(self, module: nn.Module | None) -> bool:
        """Whether an optimizer was made since watching began, or holds a parameter of a module."""
        return any(optimizer not in self._older for optimizer in living()) or _is_held(module)

    def trains(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds a watched parameter."""
        return any(self.places.of(param) is not None for param in params_of(optimizer))

    def waiting(self) -> list[Optimizer]:
        """Return the optimizers that train something watched, even if they have not stepped."""
        return [optimizer for optimizer in living() if self.trains(optimizer)]

    def entry(self, optimizer: Optimizer) -> KnownOptimizer:
        """Return the entry of an optimizer that steps; made at its first step."""
        entry = self._by_id.get(id(optimizer))
        if entry is None or entry.optimizer() is not optimizer:
            entry = KnownOptimizer(self._number(), optimizer, self.step())
            self._by_id[id(optimizer)] = entry
            self.entries.append(entry)
        return entry

    def add_by_hand(self, root: int) -> TrainedByHand:
        """Add a root that the program trains without an optimizer."""
        entry = TrainedByHand(self._number(), root, self.step())
        self.by_hand.append(entry)
        return entry

    def _number(self) -> int:
        return len(self.entries) + len(self.by_hand)

    def describe(self) -> tuple[RecordedOptimizer, ...]:
        """Return the entries of all in the recording at the end of the run."""
        described = [each.describe() for each in self._everything()]
        return tuple(sorted(described, key=_index))

    def steps_of(self, numbers: Iterable[int]) -> int:
        """Return the most steps that one of some optimizers has made."""
        wanted = set(numbers)
        own = (each for each in self._everything() if each.index in wanted)
        return max((each.steps for each in own), default=0)

    def _everything(self) -> list[KnownOptimizer | TrainedByHand]:
        return [*self.entries, *self.by_hand]

    def known(self) -> dict[int, Optimizer]:
        """Return the optimizers that have stepped and still exist, by their numbers."""
        found = ((entry.index, entry.optimizer()) for entry in self.entries)
        return {index: optimizer for index, optimizer in found if optimizer is not None}

    def stepped(self, optimizer: Optimizer) -> bool:
        """Count a step of an optimizer; returns whether it ends a step of the run."""
        entry = self.entry(optimizer)
        entry.count(self.step())
        if self.leading is entry:
            self.idle = 0
            return True
        if self.leading is None:
            return self._closes_round(optimizer)
        return self._takes_over(optimizer)

    def until_own(self, step: int, every: int) -> int | None:
        """Return how many steps of the run it takes to measure an optimizer that does not end them.

        None if that is unknown. See Note [Steps of the other optimizers] in
        `kedge.watch.steps.spacing`.
        """
        others = (entry for entry in self.entries if self.leading is not entry)
        until = (entry.until_own(step, every) for entry in others)
        return min((number for number in until if number is not None), default=None)

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
        """Whether this optimizer ends the steps from now on.

        It does if the leading one is deleted or idle, or if this one is back.
        """
        if self._displaced is not None and self._displaced() is optimizer:
            self._lead(optimizer)
            return True

        self.idle += 1
        leading = self.leading
        is_gone = leading is not None and leading.optimizer() is None
        is_new = self.entry(optimizer).index >= self._known
        patience = _PATIENCE * max(len(self.known()) - 1, 1)
        if is_new:
            patience = 1
        if not is_gone and (self.idle <= patience or not self.trains(optimizer)):
            return False
        self._lead(optimizer)
        if is_new and leading is not None:
            self._displaced = leading.optimizer
        return True

    def _lead(self, optimizer: Optimizer) -> None:
        self.leading = self.entry(optimizer)
        self.idle = 0
        self._known = self._number()
        self._displaced = None


def _index(described: RecordedOptimizer) -> int:
    return described.index or 0
