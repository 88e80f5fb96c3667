"""The program's optimizers, as a recording has them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.rules.recorded.trained import recorded_gradients, trained_sites
from kedge.store.events import (
    LearningRatesEvent,
    NotOptimizedEvent,
    OptimizersEvent,
    RecordedOptimizer,
)
from kedge.store.recording import AnyEvent, Recording
from kedge.store.rows import Floats


def optimizers(recording: Recording) -> tuple[RecordedOptimizer, ...] | None:
    """Return the program's optimizers; None if they are not recorded, as before the program ends."""
    written = events_of(recording, OptimizersEvent)
    if not written:
        return None
    return tuple(optimizer for event in written for optimizer in event.optimizers)


def without_optimizer(recording: Recording) -> str:
    """Return "no optimizer" if the program makes all updates by hand; else an empty text."""
    known = optimizers(recording)
    if known and all(optimizer.by_hand for optimizer in known):
        return "no optimizer"
    return ""


def has_optimizer(recording: Recording) -> bool:
    """Whether a step of an optimizer was recorded: only then are there parameters and norms of gradients."""
    for kind in ("param", "update", "grad.norm"):
        if any(len(recording.rows(site)) for site in trained_sites(recording, kind)):
            return True
    return False


def events_of(recording: Recording, kind: type[AnyEvent]) -> list[AnyEvent]:
    """Return the events of one kind in the order of their steps; of several ranks, which train alike, those of the lowest."""
    rank = recording.ranks[0]
    found = [event for event in recording.of(kind) if recording.rank_of(event) == rank]
    return sorted(found, key=lambda event: -1 if event.step is None else event.step)


def unheld_parameters(recording: Recording) -> set[str]:
    """Return the paths of the trainable parameters that no optimizer held at the end of the run."""
    events = events_of(recording, NotOptimizedEvent)
    return {path for event in events for path in event.unheld}


def trains_in_vain(recording: Recording) -> bool:
    """Whether parameters that no optimizer holds get gradients, and none that an optimizer holds."""
    unheld = unheld_parameters(recording)
    held = (site for site in recorded_gradients(recording) if site.path not in unheld)
    graded = any(event.graded for event in events_of(recording, NotOptimizedEvent))
    steps = bool(optimizers(recording)) or has_optimizer(recording)
    return graded and steps and not any(held)


def later_starts(recording: Recording, root: int | None = None) -> list[int]:
    """Return the steps, after the first one, in which an optimizer made its first step, in order.

    Args:
        recording: The recording.
        root: Only for optimizers that train this root; for all if None.
    """
    own: Sequence[RecordedOptimizer] = optimizers(recording) or ()
    if root is not None:
        own = _training(recording, root)
    starts = {optimizer.first_step or 0 for optimizer in own}
    return sorted(start for start in starts if start > 0)


def rates_of(recording: Recording, root: int) -> list[float]:
    """Return the learning rates of the optimizers that train a root, the highest first."""
    training = _training(recording, root)
    rates = {float(rate) for optimizer in training for rate in optimizer.rates}
    return sorted((rate for rate in rates if rate > 0), reverse=True)


@dataclass(frozen=True)
class RatesOverSteps:
    """The lowest and the highest learning rate of some optimizers in each measured step; NaN where one is not known."""

    lowest: Floats
    highest: Floats


def rates_over_steps(recording: Recording, root: int) -> RatesOverSteps:
    """Return the learning rates of the optimizers that train a root."""
    lowest = np.full(len(recording.steps), np.nan)
    highest = lowest.copy()
    numbers = {optimizer.index for optimizer in _training(recording, root)}
    now: dict[int, tuple[float | None, ...]] = {}
    for event in events_of(recording, LearningRatesEvent):
        if event.optimizer not in numbers:
            continue
        now[event.optimizer] = event.rates
        rates = [math.nan if rate is None else rate for each in now.values() for rate in each]
        since = recording.steps >= event.step
        lowest[since] = np.min(rates, initial=math.inf)
        highest[since] = np.max(rates, initial=-math.inf)
    return RatesOverSteps(lowest, highest)


def trained_by(recording: Recording, root: int) -> str:
    """Return words for the optimizers that train a root: ``Adam with a learning rate of 0.001``; empty if unknown."""
    training = _training(recording, root)
    types = ", ".join(dict.fromkeys(optimizer.type for optimizer in training))
    rates = rates_of(recording, root)
    if not types or not rates:
        return types
    return f"{types} with a learning rate of {listed_rates(rates)}"


def updater_of(recording: Recording, root: int, until: int) -> str:
    """Return words for what changes the weights of a root: ``the optimizer (Adam)``, ``the program``.

    Args:
        recording: The recording.
        root: The root.
        until: The step up to which a schedule may have raised the learning rate.
    """
    if 0 <= root < len(recording.roots) and recording.roots[root].by_hand:
        return "the program, which updates them by hand,"
    by = trained_by(recording, root)
    if not by:
        return "the optimizer"
    first = rates_of(recording, root)
    rates = rates_over_steps(recording, root).highest[recording.steps <= until]
    highest = float(np.fmax.reduce(rates, initial=0))
    if first and highest > _RAISED * first[0]:
        by += f", raised to {highest:.3g} by then"
    return f"the optimizer ({by})"


_RAISED = 1.1
"""From which multiple of its first value on a learning rate counts as raised."""


def listed_rates(rates: Iterable[float]) -> str:
    """Return the first three learning rates for a sentence."""
    return " and ".join(f"{rate:g}" for rate in list(rates)[:3])


def _training(recording: Recording, root: int) -> list[RecordedOptimizer]:
    """Return the optimizers that train a root."""
    known = optimizers(recording) or ()
    return [optimizer for optimizer in known if root in optimizer.roots]
