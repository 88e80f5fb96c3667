"""How much of a run is watched: what watching costs, and what that allows for the next step.

# Note [Three kinds of steps]
A *measured* step has the statistics of every value. A *guarded* step has the loss and the norm of all gradients, and
whether they are finite; no module is hooked in it. A *skipped* step is counted, and no more is done than to ask, on a CPU,
whether its loss is finite. The first steps are
all measured, since most mistakes show there; then as many as the budget pays for.

# Note [The budget]
Watching may take a share of the run's time, 3 % by default, or two seconds, whichever is more. The two seconds are
not spent at once: half a second is free from the beginning, and the rest comes with the square root of the time, so
that it lasts until the share has overtaken it. Measured steps may take three fifths of what is allowed, guarded steps
the rest.

To count a step takes time in each one, skipped or not. It comes first, but takes two thirds of what is allowed at most, so
that something is measured however short the steps are.

What is done besides costs what the hooks are timed to take, or more: code that runs rarely finds nothing in the
processor's caches. So the length of a step is compared with the median of those that were skipped, and the mean difference
counts, up to three times what was timed; a quarter is added, as the program's own code finds the caches cold in the steps
after it. The first step attaches the hooks, and the end of a run takes about as long: both are charged beforehand, and
half a second is free besides.

# Note [Common steps]
Two runs that are to be compared, and the ranks of one, each have a budget, and yet should measure the same steps. So
after the first ones the distance between two measured steps is `every` times a power of two, which doubles when the
budget does not pay for one, and each measured step is a multiple of it: a run that measures more often also measures
the steps of the others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from statistics import median


class StepKind(IntEnum):
    """What is done in a step; see Note [Three kinds of steps]."""

    SKIPPED = 0
    GUARDED = 1
    MEASURED = 2


FIRST_STEPS = 40
"""How many steps are measured at first, as far as the free time reaches."""
ALLOWANCE, FREE = 2.0, 0.5
"""Seconds that any run may take, and those of them that it may take at once."""
_LEARNING = 0.25
"""How much of a step's cost goes into the running mean of its kind."""
_MOST = 3.0
"""How many times what was timed a step is taken to have cost at most."""
_AFTERWARDS = 1.25
"""What a step costs with the steps after it, in times of itself: measured with models of three and of twelve layers."""
_COUNTING = 2 / 3
"""The part of what is allowed that may go into counting steps before the others have less."""
_REMEMBERED = 15
"""How many lengths of steps are remembered."""
_LONGEST_SKIPPED, _LONGEST_GUARDED = 4096, 16
"""How many steps are skipped or guarded at most before the next decision."""
_GRANTED = 8
"""How many measured steps that were asked for are made, whether the budget pays for them or not."""


@dataclass
class StepKindCost:
    """What the steps of one kind cost.

    Attributes:
        share: The part of what is allowed that they may take.
        spent: Seconds that they took.
        timed: Seconds that one was timed to take; a running mean, as the next.
        extra: Seconds by which one was longer than a skipped one.
    """

    share: float
    spent: float = 0.0
    timed: float | None = None
    extra: float | None = None

    @property
    def cost(self) -> float:
        """What one step costs, in seconds; 0 as long as there was none."""
        timed = self.timed or 0.0
        return _AFTERWARDS * min(max(self.extra or 0.0, timed), _MOST * timed)

    def charge(self, steps: int, timed: float, extra: float) -> float:
        """Charge some steps; returns what they cost."""
        self.timed, self.extra = _learn(self.timed, timed), _learn(self.extra, extra)
        self.spent += steps * self.cost
        return steps * self.cost


class Budget:
    """Decides what is done in each step; see Note [The budget].

    Args:
        every: After the first steps, one step in this many is measured at most; without a limit, exactly one.
        share: The share of the run's time that watching may take, such as 0.03; None for no limit.

    Attributes:
        kind: What is done in the step under way.
        counts: How many steps had which kind.
        seconds: What watching took in all steps that ended.
        run: How many steps of this kind there are before the next decision, the one under way included.
    """

    def __init__(self, every: int, share: float | None) -> None:
        self.every, self.share = every, share
        self.kind = StepKind.MEASURED
        self.counts = dict.fromkeys(StepKind, 0)
        self.seconds = 0.0
        self.run = self._planned = 1
        self._setup = self._per_step = self._counting = 0.0
        self._accounts = {StepKind.MEASURED: StepKindCost(0.6), StepKind.GUARDED: StepKindCost(0.4)}
        self._bare: deque[float] = deque(maxlen=_REMEMBERED)
        self._between: deque[float] = deque(maxlen=_REMEMBERED)
        self._spacing, self._asked = 1, 0
        self._wishes, self._wished = 0, False
        self._began = self._mark = 0.0

    def begin(self, now: float, per_step: float = 0.0) -> None:
        """Start the clock.

        Args:
            now: The time, in seconds.
            per_step: Seconds that it takes to count a step of any kind.
        """
        self._began = self._mark = now
        self._per_step = per_step

    def run_ended(self, step: int, now: float, timed: float) -> StepKind:
        """Charge a run of steps of one kind, and choose what is done in the next ones.

        Args:
            step: The last step of the run.
            now: The time.
            timed: Seconds that watching was timed to take in the run, besides counting the steps.
        """
        kind, steps = self.kind, self.done + 1
        length, self._mark = (now - self._mark) / steps, now
        self._count(steps)
        if not any(self.counts.values()):  # it attaches the hooks, and the end of the run takes about as long
            self._setup = 2 * timed
            self.seconds += timed
        elif kind is StepKind.SKIPPED:
            self._bare.append(length)
            self.seconds += timed
        else:
            timed /= steps
            extra = length - median(self._bare) if self._bare else timed
            self.seconds += self._accounts[kind].charge(steps, timed, extra)
            if kind is StepKind.GUARDED:
                self._between.append(length - timed)
        self.counts[kind] += steps
        return self._choose(step + 1, now)

    def interrupt(self, now: float, timed: Callable[[], float] = lambda: 0.0) -> None:
        """Guard the step under way, in the midst of a run: something in it is not finite.

        Args:
            now: The time.
            timed: Returns the seconds that watching was timed to take in the run so far; asked for if steps are charged.
        """
        self.counts[self.kind] += self.done
        self._count(self.done)
        if self.done and self.kind is StepKind.GUARDED:
            seconds = timed() / self.done
            self.seconds += self._accounts[self.kind].charge(self.done, seconds, seconds)
        self.kind, self.run, self._planned, self._mark = StepKind.GUARDED, 1, 1, now

    def wish(self) -> None:
        """Ask for the next step to be measured; that is granted a few times, and then if the budget pays for it."""
        self._wishes += 1
        self._wished |= self._wishes <= _GRANTED

    @property
    def counting(self) -> float:
        """Seconds that it took to count the steps of the run under way that have ended."""
        return self.done * self._per_step

    @property
    def done(self) -> int:
        """How many steps of the run under way have ended."""
        return self._planned - self.run

    def charge_device(self, seconds: float) -> None:
        """Charge time that measuring took on devices, which is known later."""
        self.seconds += seconds
        self._accounts[StepKind.MEASURED].spent += seconds

    def _count(self, steps: int) -> None:
        self._counting += steps * self._per_step
        self.seconds += steps * self._per_step

    def _allowed(self, now: float) -> float:
        """Return the seconds that measuring and guarding may have taken by now, besides the run's first step and its end."""
        if self.share is None:
            return math.inf
        passed = now - self._began
        ramp = math.sqrt(min(passed * self.share / ALLOWANCE, 1.0))
        setup = min(self._setup, ALLOWANCE - FREE)
        allowed = max(self.share * passed, setup + FREE + (ALLOWANCE - setup - FREE) * ramp) - setup
        return allowed - min(self._counting, _COUNTING * allowed)

    def _choose(self, step: int, now: float) -> StepKind:
        self.run = 1
        if self.share is None:
            self.kind = StepKind.MEASURED if self._wished or step % self.every == 0 else StepKind.GUARDED
        elif self._wished or self._is_due(step, now):
            self.kind = StepKind.MEASURED
        else:
            self._choose_between(step, now)
        self._planned, self._wished = self.run, False
        return self.kind

    def _choose_between(self, step: int, now: float) -> None:
        """Choose what is done in the steps until the next one that may be measured."""
        cost, left = self._cost_and_left(StepKind.GUARDED, now)
        distance = self.every * self._spacing
        due = distance - step % distance if step >= FIRST_STEPS else 1
        if left >= cost:
            self.kind, steps = StepKind.GUARDED, min(left / cost if cost else 1, _LONGEST_GUARDED)
        else:
            self.kind, steps = StepKind.SKIPPED, self._until_paid(cost - left)
        self.run = max(min(math.floor(steps), due), 1)

    def _cost_and_left(self, kind: StepKind, now: float) -> tuple[float, float]:
        account = self._accounts[kind]
        return account.cost, account.share * self._allowed(now) - account.spent

    def _is_due(self, step: int, now: float) -> bool:
        """Whether a step is to be measured; see Note [Common steps]."""
        cost, left = self._cost_and_left(StepKind.MEASURED, now)
        if step < FIRST_STEPS and left >= cost:
            return True
        distance = self.every * self._spacing
        asked, self._asked = self._asked, step
        if step // distance == asked // distance:
            return False
        if left < cost:
            self._spacing *= 2
        elif left > 2 * cost:
            self._spacing = max(self._spacing // 2, 1)
        return left >= cost

    def _until_paid(self, lack: float) -> float:
        """Return in how many steps a guarded one is paid for."""
        lengths = self._bare or self._between
        if not lengths or self.share is None:
            return 1
        income = self._accounts[StepKind.GUARDED].share * self.share * max(median(lengths), 1e-7)
        return min(lack / income + 1, _LONGEST_SKIPPED)


def _learn(known: float | None, value: float) -> float:
    """Take a value into a running mean, but not one too far from it; a step may be slow for reasons of its own."""
    if known is None:
        return value
    far = (_MOST - 1) * abs(known)
    return known + _LEARNING * min(max(value - known, -far), far)
