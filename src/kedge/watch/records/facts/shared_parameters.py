"""Parameters that two optimizers hold, and whether both use the same gradients of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any

import torch
from torch.optim import Optimizer

from kedge.store.events import SharedParametersEvent
from kedge.watch.models.optimizers import KnownOptimizer, Optimizers, params_of
from kedge.watch.models.parameters import WatchedParameters
from kedge.watch.models.slots import OptimizerSlot, slots_in
from kedge.watch.records.facts.kept_gradients import CHECKED, KeptGradient, gradient_at, is_left

_NAMED = 50
"""Most names in a note."""


@dataclass
class _Pair:
    """Two optimizers that hold the same parameters.

    Attributes:
        names: The paths of these parameters, as far as they are watched.
        count: How many they are.
        slots: Where some of them stand.
        used: The gradients of these that one of the two used last.
        by: The number of that one.
        step: The run's step of that.
        compared: In how many steps of the run both stepped.
        same: In how many of them the second used gradients that the first had used.
    """

    names: tuple[str, ...]
    count: int
    slots: list[OptimizerSlot]
    used: list[KeptGradient] = field(default_factory=list)
    by: int = -1
    step: int = -1
    compared: int = 0
    same: int = 0


class SharedParameters:
    """Looks at optimizers that hold the same parameters, in measured steps."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], _Pair] = {}

    def compare(self, optimizers: Optimizers, places: WatchedParameters) -> None:
        """Look for pairs among the optimizers that have stepped."""
        living = optimizers.known()
        for one, other in combinations(living, 2):
            if (one, other) in self._pairs or _wraps(living[one], living[other]):
                continue
            theirs = {id(param) for param in params_of(living[other])}
            shared = [(slot, p) for slot, p in slots_in(living[one]) if id(p) in theirs]
            if shared:
                paths = (place.site.path for place in places.among(p for _, p in shared))
                names = tuple(islice(paths, _NAMED))
                # The last ones are near the loss, where a gradient is seldom missing.
                slots = [slot for slot, _ in shared[-CHECKED:]]
                self._pairs[one, other] = _Pair(names, len(shared), slots)

    def before_step(self, step: int, index: int) -> None:
        """Compare the gradients that an optimizer is about to use with those that the other one used."""
        for numbers, pair in self._pairs.items():
            if index not in numbers:
                continue
            if pair.by not in (-1, index) and pair.step == step and pair.used:
                pair.compared += 1
                pair.same += all(map(is_left, pair.used))
            pair.used = list(_gradients(pair.slots))
            pair.by = index
            pair.step = step

    def notes(self, optimizers: Optimizers) -> list[SharedParametersEvent]:
        """Return the notes at the end of the run, of pairs that stepped in turn."""
        entries = {entry.index: entry for entry in optimizers.entries}
        notes = []
        for (one, other), pair in self._pairs.items():
            if not _in_turn(entries[one], entries[other]):
                continue
            note = SharedParametersEvent(
                optimizers=(one, other),
                parameters=pair.names,
                count=pair.count,
                compared=pair.compared,
                same=pair.same,
            )
            notes.append(note)
        return notes


def _gradients(slots: list[OptimizerSlot]) -> Iterator[KeptGradient]:
    for slot in slots:
        param = slot()
        if param is None or param.grad is None:
            continue
        if param.grad.layout is torch.strided:
            yield gradient_at(slot, param.grad)


def _in_turn(one: KnownOptimizer, other: KnownOptimizer) -> bool:
    """Whether each of two optimizers stepped after the other had begun: else one has taken over."""
    return one.last >= other.first_step and other.last >= one.first_step


def _wraps(one: Optimizer, other: Optimizer) -> bool:
    """Whether one of two optimizers holds the other, or its groups, and steps by it."""
    if any(mine is its for mine in one.param_groups for its in other.param_groups):
        return True
    return _holds(one, other) or _holds(other, one)


def _holds(optimizer: Optimizer, inner: Optimizer) -> bool:
    values: list[Any] = list(vars(optimizer).values())
    for value in values:
        inside = value
        if isinstance(value, dict):
            inside = tuple(value.values())
        if value is inner:
            return True
        if isinstance(inside, (list, tuple)) and any(each is inner for each in inside):
            return True
    return False
