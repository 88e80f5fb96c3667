"""The solver: the saved tensors to keep, and the treatment of the others.

# Note [Greedy]
All are kept at first. Then the solver treats, one by one, the tensor that frees the most bytes for
each exposed second: first those that cost nothing, in the order in which they are saved, because
the first saved is needed last. The sequence does not depend on the limit of memory, so a smaller
limit only goes further along it. Under a limit of time the solver skips changes that do not fit.
The last saved tensors are needed first, so nothing hides their moves, and they are kept the
longest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kedge.offload.engine.policy import Choice
from kedge.offload.plan.plan import OffloadPlan
from kedge.offload.plan.predict import Forecast, PredictedCost
from kedge.offload.plan.tables import Limit, StepTable, Treatment

_NOTHING = 1e-9
"""Seconds that are ignored, so that rounding decides nothing."""
_RANKS = (Choice.REBUILD, Choice.MOVE, Choice.COMPRESS)
"""Choices in order of preference: no move without need, and no lossy codec without need."""


def solve(table: StepTable, limit: Limit, freed: float = math.inf) -> OffloadPlan:
    """Return the plan for a step within a limit.

    Args:
        table: The step.
        limit: The limit of memory or of time.
        freed: Under a limit of time, the most bytes that are not kept.

    Returns:
        The plan. If no choices stay within a limit of memory, the plan treats every tensor.
    """
    forecast = Forecast(table)
    search = _Search(table, forecast)
    if limit.memory is not None:
        for _ in search.steps(None):
            if forecast.peak(search.outcome) <= limit.memory:
                break
    else:
        assert limit.slowdown is not None  # noqa: S101 - one of the two is given
        most = (limit.slowdown - 1) * table.step
        for _ in search.steps(most, least=table.nbytes - freed):
            pass

    outcome = forecast.of(search.treatments)
    all_moved = forecast.of(_all_moved(table))
    return OffloadPlan(
        table=table,
        limit=limit,
        treatments=tuple(search.treatments),
        outcome=outcome,
        peak=forecast.peak(outcome),
        hidden=_hidden(table),
        everything=all_moved.exposed,
    )


def _all_moved(table: StepTable) -> list[Treatment]:
    moved = []
    for each in table.candidates:
        treatment = Treatment(Choice.KEEP, each.nbytes)
        for one in each.treatments(table.link):
            if one.choice is Choice.MOVE:
                treatment = one
        moved.append(treatment)
    return moved


def _hidden(table: StepTable) -> int:
    """The bytes that can move each way fully hidden behind the computation."""
    if table.link is None or not table.link.overlaps:
        return 0
    search = _Search(table, Forecast(table), only=Choice.MOVE)
    for _ in search.steps(0.0):
        pass
    return search.outcome.moved


class _Step(NamedTuple):
    """A change of one choice; the smallest is the best.

    Attributes:
        price: Exposed seconds for each byte that it frees.
        saved: When the tensor is saved.
        which: The index of the tensor.
        rank: The preference of its choice, all else being equal.
        treatment: The treatment of the tensor.
        age: The number of changes made before the price was computed.
    """

    price: float
    saved: float
    which: int
    rank: int
    treatment: Treatment
    age: int


class _Search:
    """The sequence of changes; see Note [Greedy].

    Attributes:
        treatments: The treatments chosen so far.
        outcome: Their predicted cost.
    """

    def __init__(self, table: StepTable, forecast: Forecast, only: Choice | None = None) -> None:
        self._table = table
        self._forecast = forecast
        self._only = only
        self.treatments = [Treatment(Choice.KEEP, each.nbytes) for each in table.candidates]
        self.outcome: PredictedCost = forecast.of(self.treatments)
        self._moved = np.zeros(len(self.treatments))
        self._seconds = 0.0
        self._additive = table.link is None or not table.link.overlaps

    def steps(self, most: float | None, least: float = 0.0) -> Iterator[None]:
        """Iterator that makes one change after another; yields before each, and at the end.

        Args:
            most: The seconds that may be exposed; None for no limit.
            least: Beside such a limit, the bytes that have to stay.
        """
        heap: list[_Step] = []
        for i, each in enumerate(self._table.candidates):
            treatments = each.treatments(self._table.link)
            allowed = [one for one in treatments if self._only in (None, one.choice)]
            heap += [self._priced(i, one, 0) for one in allowed]
        heapq.heapify(heap)

        age = 0
        while heap:
            best = heapq.heappop(heap)
            now = self.treatments[best.which]
            if best.treatment.kept >= now.kept:
                continue
            is_fixed = self._additive and now.choice is Choice.KEEP
            if best.age < age and not is_fixed:
                # The price may have changed: with the other moves, or as the tensor is no longer
                # kept whole.
                best = self._priced(best.which, best.treatment, age)
                if heap and best > heap[0]:
                    heapq.heappush(heap, best)
                    continue
            if most is not None:
                after = self._with(best)
                if after.kept < least or after.exposed > most + _NOTHING:
                    continue
            yield
            self._make(best)
            age += 1
        yield

    def _make(self, step: _Step) -> None:
        self.outcome = self._with(step)
        self._seconds += step.treatment.seconds - self.treatments[step.which].seconds
        self._moved[step.which] = step.treatment.moved
        self.treatments[step.which] = step.treatment

    def _with(self, step: _Step) -> PredictedCost:
        """Return the predicted cost after a change."""
        before, after = self.treatments[step.which], step.treatment
        self._moved[step.which] = after.moved
        waits = self._forecast.waits(self._moved)
        self._moved[step.which] = before.moved
        return PredictedCost(
            self.outcome.kept + after.kept - before.kept,
            self.outcome.moved + after.moved - before.moved,
            self._seconds + after.seconds - before.seconds + waits,
        )

    def _priced(self, index: int, treatment: Treatment, age: int) -> _Step:
        candidate = self._table.candidates[index]
        rank = _RANKS.index(treatment.choice)
        step = _Step(0.0, candidate.saved, index, rank, treatment, age)

        price = 0.0
        shows = self._with(step).exposed - self.outcome.exposed
        if abs(shows) >= _NOTHING:
            price = shows / (self.treatments[index].kept - treatment.kept)
        return step._replace(price=float(f"{price:.6g}"))
