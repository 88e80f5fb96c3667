"""The solver: the saved tensors to keep, and the treatment of the others.

# Note [Greedy]
All are kept at first. Then the solver treats, one by one, the tensor that frees the most bytes for
each exposed second: first those that cost nothing, in the order in which they are saved, because
the first saved is needed last. The sequence does not depend on the limit of memory, so a smaller
limit only goes further along it. Under a limit of time the solver skips changes that do not fit.
A call that is run again frees all that it saves, so its price falls with what is spent on its
tensors one by one; at the end, calls that are cheaper run again than treated so are run again.
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
from kedge.offload.plan.tables import Limit, RepeatableCall, StepTable, Treatment

_NOTHING = 1e-9
"""Seconds that are ignored, so that rounding decides nothing."""
_RANKS = (Choice.REBUILD, Choice.MOVE, Choice.RECOMPUTE, Choice.COMPRESS)
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
    treatments = search.treatments
    if limit.memory is not None:
        treatments = _within(limit.memory, search, forecast)
    else:
        assert limit.slowdown is not None  # noqa: S101 - one of the two is given
        most = (limit.slowdown - 1) * table.step
        for _ in search.steps(most, least=table.nbytes - freed):
            pass

    outcome = forecast.of(treatments)
    all_moved = forecast.of(_all_moved(table))
    return OffloadPlan(
        table=table,
        limit=limit,
        treatments=tuple(treatments),
        outcome=outcome,
        peak=forecast.peak(outcome, treatments),
        hidden=_hidden(table),
        everything=all_moved.exposed,
    )


def _within(memory: int, search: _Search, forecast: Forecast) -> list[Treatment]:
    """Return treatments whose peak is within a limit; without any, those of the least peak."""
    least: float = math.inf
    best: list[Treatment] = []
    for _ in search.steps(None):
        peak = forecast.peak(search.outcome, search.treatments)
        if peak < least:
            least = peak
            best = list(search.treatments)
        if peak <= memory:
            break
    for _ in search.cheaper_calls():
        peak = forecast.peak(search.outcome, search.treatments)
        if peak <= max(memory, least):
            best = list(search.treatments)
    return best


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
        saved: When the first of the tensors is saved.
        which: The indices of the tensors.
        rank: The preference of its choice, all else being equal.
        treatments: The treatment of each of the tensors.
        age: The number of changes made before the price was computed.
    """

    price: float
    saved: float
    which: tuple[int, ...]
    rank: int
    treatments: tuple[Treatment, ...]
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
        heap = [self._priced(step, 0) for step in self._possible()]
        heapq.heapify(heap)

        age = 0
        while heap:
            best = heapq.heappop(heap)
            if not self._frees(best):
                continue
            now = [self.treatments[i].choice for i in best.which]
            is_fixed = self._additive and set(now) == {Choice.KEEP}
            if best.age < age and not is_fixed:
                # The price may have changed: with the other moves, or as the tensors are no longer
                # kept whole.
                best = self._priced(best, age)
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

    def cheaper_calls(self) -> Iterator[None]:
        """Iterator that runs calls again where that takes less time than what is done instead; yields after each."""
        for call in self._table.calls:
            step = self._call_step(call)
            if step is None or not self._frees(step):
                continue
            if self._with(step).exposed < self.outcome.exposed - _NOTHING:
                self._make(step)
                yield

    def _possible(self) -> Iterator[_Step]:
        """Every change from keeping a tensor, or the tensors of a call; not priced yet."""
        for i, each in enumerate(self._table.candidates):
            for one in each.treatments(self._table.link):
                if self._only in (None, one.choice):
                    rank = _RANKS.index(one.choice)
                    yield _Step(0.0, each.saved, (i,), rank, (one,), 0)
        if self._only is None:
            for call in self._table.calls:
                step = self._call_step(call)
                if step is not None and self._frees(step):
                    yield step

    def _call_step(self, call: RepeatableCall) -> _Step | None:
        members = self._table.members[call.key]
        if not members:
            return None
        saved = self._table.candidates[members[0]].saved
        rank = _RANKS.index(Choice.RECOMPUTE)
        treatments = tuple(call.treatments(len(members)))
        return _Step(0.0, saved, tuple(members), rank, treatments, 0)

    def _frees(self, step: _Step) -> bool:
        """Whether a change frees bytes; there is none for the tensors of a call that is run again."""
        now = [self.treatments[i] for i in step.which]
        if any(one.choice is Choice.RECOMPUTE for one in now):
            return False
        return sum(one.kept for one in step.treatments) < sum(one.kept for one in now)

    def _make(self, step: _Step) -> None:
        self.outcome = self._with(step)
        for i, treatment in zip(step.which, step.treatments, strict=True):
            self._seconds += treatment.seconds - self.treatments[i].seconds
            self._moved[i] = treatment.moved
            self.treatments[i] = treatment

    def _with(self, step: _Step) -> PredictedCost:
        """Return the predicted cost after a change."""
        kept = self.outcome.kept
        moved = self.outcome.moved
        seconds = self._seconds
        for i, after in zip(step.which, step.treatments, strict=True):
            before = self.treatments[i]
            kept += after.kept - before.kept
            moved += after.moved - before.moved
            seconds += after.seconds - before.seconds
            self._moved[i] = after.moved
        waits = self._forecast.waits(self._moved)
        for i in step.which:
            self._moved[i] = self.treatments[i].moved
        return PredictedCost(kept, moved, seconds + waits)

    def _priced(self, step: _Step, age: int) -> _Step:
        """Return a change with its price now."""
        after = self._with(step)
        price = 0.0
        shows = after.exposed - self.outcome.exposed
        if abs(shows) >= _NOTHING:
            price = shows / (self.outcome.kept - after.kept)
        return step._replace(price=float(f"{price:.6g}"), age=age)
