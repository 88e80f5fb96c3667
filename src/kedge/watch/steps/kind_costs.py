"""The cost of the steps of each kind: their timed seconds, corrected by their lengths.

See Note [The budget] in `kedge.watch.steps.budget`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from kedge.watch.step import StepKind

_LEARNING = 0.25
"""Weight of a step's cost in the running mean of its kind."""
_MOST = 3.0
"""Most that a step is assumed to cost, as a multiple of its timed cost."""
_AFTERWARDS = 1.25
"""Cost of a step with the steps after it, as a multiple of its own.

Measured with models of 3 and of 12 layers.
"""
_REMEMBERED = 15
"""How many step lengths are remembered."""


@dataclass
class StepKindCost:
    """The cost of the steps of one kind.

    Attributes:
        share: The part of the allowed time that they may take.
        spent: Seconds that they have taken.
        timed: Timed seconds of one step; a running mean, like the next.
        extra: Seconds by which one step was longer than a skipped one.
    """

    share: float
    spent: float = 0.0
    timed: float | None = None
    extra: float | None = None

    @property
    def cost(self) -> float:
        """The cost of one step, in seconds; 0 as long as there was none."""
        timed = self.timed or 0.0
        return _AFTERWARDS * min(max(self.extra or 0.0, timed), _MOST * timed)

    def charge(self, steps: int, timed: float, extra: float) -> float:
        """Charge some steps; returns their cost in seconds."""
        self.timed = _learn(self.timed, timed)
        self.extra = _learn(self.extra, extra)
        seconds = steps * self.cost
        self.spent += seconds
        return seconds


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
        known = self._costs[kind]
        seconds = known.charge(steps, timed, extra)
        if apart:
            known.spent -= seconds
        return seconds

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
        return known.cost, known.share * allowed - known.spent

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


def _learn(known: float | None, value: float) -> float:
    """Add a value to a running mean, limited to a distance from it.

    Single steps may be slow for other reasons.
    """
    if known is None:
        return value
    far = (_MOST - 1) * abs(known)
    return known + _LEARNING * min(max(value - known, -far), far)
