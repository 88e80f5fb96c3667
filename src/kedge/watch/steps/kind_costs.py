"""The cost of the steps of each kind: their timed seconds, corrected by their lengths.

See Note [The budget] in `kedge.watch.steps.budget`.
"""

from __future__ import annotations

from collections import deque
from statistics import median, median_low
from typing import NamedTuple

from kedge.watch.step import StepKind

_MOST = 3.0
"""Most that a step is assumed to cost, as a multiple of its timed cost."""
_AFTERWARDS = 1.25
"""Cost of a step with the steps after it, as a multiple of its own.

Measured with models of 3 and of 12 layers.
"""
_REMEMBERED = 15
"""How many step lengths are remembered."""
_RECENT = 7
"""The last steps, which tell what one costs."""
_EARLY = 8
"""The first steps of a kind, in which something may happen for the first time."""


class StepKindCost:
    """The cost of the steps of one kind; see Note [What happens once] in `kedge.watch.steps.budget`.

    Args:
        share: The part of the allowed time that they may take.

    Attributes:
        cost: The cost that is expected of one step, in seconds; 0 as long as there was none.
        spent: Seconds that they have taken of their part.
        once: Seconds that some early steps took beyond what a step usually takes.
        once_in_spent: Those of them that are in `spent`.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.cost = self.spent = 0.0
        self.once = self.once_in_spent = 0.0
        self._timed: deque[float] = deque(maxlen=_RECENT)
        self._extra: deque[float] = deque(maxlen=_RECENT)
        self._early: list[EarlySteps] = []

    def charge(self, steps: int, timed: float, extra: float, *, apart: bool = False) -> float:
        """Charge some steps; returns their cost in seconds.

        Args:
            steps: How many they are.
            timed: Timed seconds of one.
            extra: Seconds by which one was longer than a skipped one.
            apart: Whether they do not count in the part of their kind.
        """
        self._timed.append(timed)
        self._extra.append(extra)
        cheapest = min(self._timed)
        typical = median_low(self._timed)
        factor = _AFTERWARDS
        if typical:
            factor *= min(max(median_low(self._extra) / typical, 1.0), _MOST)
        self.cost = cheapest * factor

        usual = min(timed, _MOST * cheapest)
        seconds = steps * (usual * factor + timed - usual)
        if not apart:
            self.spent += seconds
        if len(self._early) < _EARLY:
            self._early.append(EarlySteps(seconds, apart))
            dear = [early for early in self._early if early.seconds > _MOST * self.cost]
            self.once = sum(early.seconds - self.cost for early in dear)
            self.once_in_spent = sum(e.seconds - self.cost for e in dear if not e.apart)
        return seconds


class EarlySteps(NamedTuple):
    """What the first steps of a kind cost.

    Attributes:
        seconds: Their cost.
        apart: Whether they do not count in the part of their kind.
    """

    seconds: float
    apart: bool


class KindCosts:
    """The costs of measured and guarded steps, and the lengths of steps without them."""

    def __init__(self) -> None:
        self._costs = {
            StepKind.MEASURED: StepKindCost(share=0.6),
            StepKind.GUARDED: StepKindCost(share=0.4),
        }
        self._skipped: deque[float] = deque(maxlen=_REMEMBERED)
        self._between: deque[float] = deque(maxlen=_REMEMBERED)

    def charge(
        self, kind: StepKind, steps: int, length: float, timed: float, *, apart: bool = False
    ) -> float:
        """Charge a run of steps of one kind; returns its cost in seconds.

        Args:
            kind: The kind.
            steps: How many steps the run had.
            length: The mean length of a step, in seconds.
            timed: Timed seconds of watching in the run.
            apart: Whether the seconds do not count in the part of the kind.
        """
        if kind is StepKind.SKIPPED:
            self._skipped.append(length)
            return timed
        timed /= steps
        extra = timed
        if self._skipped:
            extra = length - median(self._skipped)
        if kind is StepKind.GUARDED:
            self._between.append(length - timed)
        return self._costs[kind].charge(steps, timed, extra, apart=apart)

    def charge_interrupted(self, steps: int, timed: float) -> float:
        """Charge the guarded steps of an interrupted run, whose lengths are unknown.

        Returns their cost in seconds.
        """
        each = timed / steps
        return self._costs[StepKind.GUARDED].charge(steps, each, each)

    def charge_device(self, seconds: float) -> None:
        """Charge seconds that measuring took on devices."""
        self._costs[StepKind.MEASURED].spent += seconds

    def cost_and_left(self, kind: StepKind, allowed: float) -> tuple[float, float]:
        """Return the cost of one step of a kind, and the seconds that are left for this kind.

        Args:
            kind: The kind.
            allowed: Seconds that measuring and guarding may take by now.
        """
        known = self._costs[kind]
        return known.cost, known.share * allowed - known.spent + known.once_in_spent

    def once(self) -> float:
        """Return the seconds that early steps took beyond what they usually take."""
        return sum(known.once for known in self._costs.values())

    def until_paid(self, lack: float, share: float) -> float:
        """Return the number of steps after which a guarded one is paid for.

        Args:
            lack: The seconds that are missing.
            share: The share of the run's time that watching may take.
        """
        lengths = self._skipped or self._between
        if not lengths:
            return 1
        length = max(median(lengths), 1e-7)
        earned = self._costs[StepKind.GUARDED].share * share * length
        return lack / earned + 1
