"""The budget: the measured cost of watching, and the kind of step that it allows next.

# Note [Three kinds of steps]
A *measured* step has the statistics of every value. A *guarded* step has the loss and the norm of all gradients, and
checks whether they are finite; it hooks no module. A *skipped* step is counted and, on a CPU, its loss checked for
being finite; nothing more. The first steps are all measured, since most mistakes show there; then as many as the budget
pays for.

# Note [The budget]
Watching may take a share of the run's time, 3 % by default, or two seconds, whichever is more. The two seconds are
not spent at once: half a second is free from the beginning, and the rest comes with the square root of the time, so
that it lasts until the share has overtaken it. Measured steps may take three fifths of the allowed time, guarded steps
the rest.

Counting takes time in every step, also in skipped ones. It is paid first, but with two thirds of the allowed time at
most, so that something is measured however short the steps are.

The rest costs as much as the hooks are timed to take, or more: code that runs rarely finds nothing in the processor's
caches. So the length of a step is compared with the median length of skipped steps, and the mean difference counts, up
to three times the timed cost; a quarter is added, since the program's own code finds the caches cold in the following
steps. The first step attaches the hooks, and the end of a run takes about as long: both are charged beforehand, and
half a second is free besides.

# Note [Common steps]
Two runs that are to be compared, and the ranks of one run, have a budget each, and yet should measure the same steps.
So after the first ones the distance between two measured steps is `every` times a power of two, which doubles when the
budget does not pay for a measured step, and each measured step is a multiple of this distance: a run that measures more
often also measures the steps of the others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from statistics import median


class StepKind(IntEnum):
    """The kind of a step; see Note [Three kinds of steps]."""

    SKIPPED = 0
    GUARDED = 1
    MEASURED = 2


FIRST_STEPS = 40
"""Steps that are measured at first, as far as the free time reaches."""
ALLOWANCE, FREE = 2.0, 0.5
"""Seconds that watching may take in any run, and those of them that are free at once."""
_LEARNING = 0.25
"""Weight of a step's cost in the running mean of its kind."""
_MOST = 3.0
"""Most that a step is assumed to cost, as a multiple of its timed cost."""
_AFTERWARDS = 1.25
"""Cost of a step with the steps after it, as a multiple of its own: measured with models of 3 and of 12 layers."""
_COUNTING = 2 / 3
"""Largest part of the allowed time that counting steps may take from the other work."""
_REMEMBERED = 15
"""How many step lengths are remembered."""
_LONGEST_SKIPPED, _LONGEST_GUARDED = 4096, 16
"""Most steps that are skipped, or guarded, before the next decision."""
_GRANTED = 8
"""How many requested measured steps are granted regardless of the budget."""


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
        self.timed, self.extra = _learn(self.timed, timed), _learn(self.extra, extra)
        self.spent += steps * self.cost
        return steps * self.cost


class Budget:
    """Decides the kind of each step; see Note [The budget].

    Args:
        every: After the first steps, at most one step in this many is measured; without a limit, exactly one.
        share: The share of the run's time that watching may take, such as 0.03; None for no limit.

    Attributes:
        kind: The kind of the current step.
        counts: Steps of each kind.
        seconds: Seconds that watching took in all steps that ended.
        run: Steps of this kind before the next decision, the current one included.
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
            per_step: Seconds that counting one step of any kind takes.
        """
        self._began = self._mark = now
        self._per_step = per_step

    def run_ended(self, step: int, now: float, timed: float) -> StepKind:
        """Charge a run of steps of one kind, and choose the kind of the next ones.

        Args:
            step: The last step of the run.
            now: The time, in seconds.
            timed: Timed seconds of watching in the run, besides counting the steps.
        """
        kind, steps = self.kind, self.done + 1
        length, self._mark = (now - self._mark) / steps, now
        self._count(steps)
        if not any(self.counts.values()):  # attaches the hooks; the end of the run takes about as long
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
        """Make the current step a guarded one, in the middle of a run, because something in it is not finite.

        Args:
            now: The time, in seconds.
            timed: Returns the timed seconds of watching in the run so far; called only if steps are charged.
        """
        self.counts[self.kind] += self.done
        self._count(self.done)
        if self.done and self.kind is StepKind.GUARDED:
            seconds = timed() / self.done
            self.seconds += self._accounts[self.kind].charge(self.done, seconds, seconds)
        self.kind, self.run, self._planned, self._mark = StepKind.GUARDED, 1, 1, now

    def wish(self) -> None:
        """Request a measured step next; granted a few times in any case, then if the budget pays for it."""
        self._wishes += 1
        self._wished |= self._wishes <= _GRANTED

    @property
    def counting(self) -> float:
        """Seconds spent on counting those steps of the current run that have ended."""
        return self.done * self._per_step

    @property
    def done(self) -> int:
        """Steps of the current run that have ended."""
        return self._planned - self.run

    def charge_device(self, seconds: float) -> None:
        """Charge seconds that measuring took on devices, which are known later."""
        self.seconds += seconds
        self._accounts[StepKind.MEASURED].spent += seconds

    def _count(self, steps: int) -> None:
        self._counting += steps * self._per_step
        self.seconds += steps * self._per_step

    def _allowed(self, now: float) -> float:
        """Return the seconds allowed by now for measuring and guarding, besides the run's first step and its end."""
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
        """Choose the kind of the steps before the next one that may be measured."""
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
        """Whether a step is measured; see Note [Common steps]."""
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
        """Return the number of steps after which a guarded one is paid for."""
        lengths = self._bare or self._between
        if not lengths or self.share is None:
            return 1
        income = self._accounts[StepKind.GUARDED].share * self.share * max(median(lengths), 1e-7)
        return min(lack / income + 1, _LONGEST_SKIPPED)


def _learn(known: float | None, value: float) -> float:
    """Add a value to a running mean, limited to a distance from it; single steps may be slow for other reasons."""
    if known is None:
        return value
    far = (_MOST - 1) * abs(known)
    return known + _LEARNING * min(max(value - known, -far), far)
