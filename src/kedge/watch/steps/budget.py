"""The budget: the measured cost of watching, and the kind of step that it allows next.

# Note [The budget]
Watching may take a share of the run's time, 3 % by default, or three seconds, whichever is more. The
three seconds are not spent at once: half a second is free from the beginning, and the rest comes
with the square root of the time, so that it lasts until the share has overtaken it. Measured steps
may take three fifths of the allowed time, guarded steps the rest.

Landmarks, see Note [Landmarks] in `kedge.watch.steps.spacing`, do not count in the part for measured
steps, but in the limit of the whole run. To leave something for them, other steps are measured
until watching has taken a second and a half, and then only if the share alone pays for them.

Counting takes time in every step, also in skipped ones, and so do the checks of those. Both are paid
first, but with two thirds of the allowed time at most, so that something is measured however short
the steps are.

The rest costs as much as the hooks are timed to take, or more: code that runs rarely finds nothing
in the processor's caches. So the length of a step is compared with the median length of skipped
steps, and the median difference counts, up to three times the timed cost; a quarter is added, since
the program's own code finds the caches cold in the following steps.

# Note [What happens once]
The first step attaches the hooks. On a device, the first value of a dtype has a kernel compiled, the
first table has memory allocated and libraries loaded. All this is counted and printed, but says
nothing of what looking costs; charged to it, it would leave nothing for the rest of a run, and as
measured steps are taken only if they can be paid, nothing would show how cheap they have become. So
a step is expected to cost what the cheapest of the last ones did, and is charged what it takes. If
an early one takes more than three times that, the rest is allowed besides, up to ten seconds in
all. What it was is known when a later step has been measured: so the first five are, whatever they
cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kedge.watch.step import StepKind
from kedge.watch.steps.kind_costs import KindCosts
from kedge.watch.steps.spacing import ALWAYS, FIRST_STEPS, Spacing

ALLOWANCE = 3.0
"""Seconds that watching may take in any run."""
_FREE = 0.5
"""Those of them that are free at once."""
_COUNTING = 2 / 3
"""Largest part of the allowed time that counting steps, and compiling, may take."""
_FOR_THE_FIRST = 10.0
"""Seconds of watching up to which the first few steps are measured."""
_MOST_ONCE = 10.0
"""Most seconds of what happens once that are allowed besides."""
_AT_ONCE = 1.5
"""Seconds of watching up to which a step that is no landmark need not be earned."""
_LONGEST_SKIPPED = 4096
"""Most steps that are skipped before the next decision."""
_LONGEST_GUARDED = 16
"""Most steps that are guarded before the next decision."""
_GRANTED = 8
"""How many requested measured steps are granted regardless of the budget."""


class Budget:
    """Decides the kind of each step; see Note [The budget].

    Args:
        every: After the first steps, at most one step in this many is measured; without a limit,
            exactly one.
        share: The share of the run's time that watching may take, such as 0.03; None for no limit.
        others: Returns when another optimizer's step is due; see `Spacing`.

    Attributes:
        spacing: Which steps may be measured.
        kind: The kind of the current step.
        counts: Steps of each kind.
        seconds: Seconds that watching took in all steps that ended.
        run: Steps of this kind before the next decision, the current one included.
    """

    def __init__(
        self,
        every: int,
        share: float | None,
        others: Callable[[int, int], int | None] = lambda _step, _distance: None,
    ) -> None:
        self.kind = StepKind.MEASURED
        self.counts = dict.fromkeys(StepKind, 0)
        self.seconds = 0.0
        self.run = self._planned = 1
        self._time = AllowedTime(share)
        self._costs = KindCosts()
        self.spacing = Spacing(every, others)
        self._per_step = self._mark = 0.0
        self._wishes = 0
        self._wished = False
        self._is_apart = True

    def begin(self, now: float, per_step: float = 0.0) -> None:
        """Start the clock.

        Args:
            now: The time, in seconds.
            per_step: Seconds that counting one step of any kind takes.
        """
        self._time.begin(now)
        self._mark = now
        self._per_step = per_step

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        return self._time.share is not None

    def run_ended(self, step: int, now: float, timed: float) -> StepKind:
        """Charge a run of steps of one kind, and choose the kind of the next ones.

        Args:
            step: The last step of the run.
            now: The time, in seconds.
            timed: Timed seconds of watching in the run, besides counting the steps.
        """
        steps = self.done + 1
        length = (now - self._mark) / steps
        self._mark = now
        self._count(steps)
        if any(self.counts.values()):
            self.seconds += self._costs.charge(
                self.kind, steps, length, timed, apart=self._is_apart
            )
        else:
            self._time.first = timed
            self.seconds += timed
        self._time.once = self._costs.once()
        if self.kind is StepKind.SKIPPED:
            self._time.counting += timed
        self.counts[self.kind] += steps
        return self._choose(step + 1, now)

    def interrupt(self, now: float, timed: Callable[[], float] = lambda: 0.0) -> None:
        """Make the current step a guarded one, in the middle of a run, as something is not finite.

        Args:
            now: The time, in seconds.
            timed: Returns the timed seconds of watching in the run so far; called only if steps are
                charged.
        """
        self.counts[self.kind] += self.done
        self._count(self.done)
        if self.done and self.kind is StepKind.GUARDED:
            self.seconds += self._costs.charge_interrupted(self.done, timed())
        self.kind = StepKind.GUARDED
        self.run = self._planned = 1
        self._mark = now

    def cut(self) -> None:
        """Make the current step the last one of its run, so that the next one is chosen anew."""
        self._planned = self.done + 1
        self.run = 1

    def wish(self) -> None:
        """Request a measured step next.

        Granted a few times in any case, then if the budget pays for it.
        """
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
        self._costs.charge_device(seconds)

    def charge_compiled(self, seconds: float) -> None:
        """Charge seconds of compiled code in steps that are not measured.

        It takes them to run Kedge's operators, or to compile.
        """
        self._time.counting += seconds
        self.seconds += seconds

    def pays_for(self, seconds: float, now: float) -> bool:
        """Whether so many seconds at once would stay within the limit; never without a limit."""
        return self.is_limited and self.seconds + seconds <= self._time.limit(now)

    def _count(self, steps: int) -> None:
        seconds = steps * self._per_step
        self._time.counting += seconds
        self.seconds += seconds

    def _choose(self, step: int, now: float) -> StepKind:
        """Choose the kind of a step, and the number of steps until the next decision."""
        self.run = 1
        self.kind = StepKind.MEASURED
        share = self._time.share
        if share is None:
            if not self._wished and not self.spacing.is_due(step):
                self.kind = StepKind.GUARDED
        else:
            cost, left = self._measuring(now)
            is_due = self._is_due(step, cost, left)
            is_paid_at_once = cost <= self._below_limit(now)
            if step < ALWAYS:
                is_paid_at_once = self.seconds + cost <= _FOR_THE_FIRST
            self._is_apart = self.spacing.is_landmark(step) and is_paid_at_once
            if not (self._is_apart or self._wished or is_due):
                self._choose_between(step, now, share)
        self._planned = self.run
        self._wished = False
        return self.kind

    def _measuring(self, now: float) -> tuple[float, float]:
        """Return the cost of a measured step, and the seconds that are left for one that is no landmark."""
        cost, allowed = self._costs.cost_and_left(StepKind.MEASURED, self._time.by(now))
        _, earned = self._costs.cost_and_left(StepKind.MEASURED, self._time.earned(now))
        at_once = _AT_ONCE + self._time.besides - self._looking
        return cost, min(max(earned, min(allowed, at_once)), self._below_limit(now))

    @property
    def _looking(self) -> float:
        """The seconds that watching took so far, but for those of counting steps, which are paid besides."""
        return self.seconds - self._time.counting

    def _below_limit(self, now: float) -> float:
        """Return the seconds below the limit of the whole run."""
        return self._time.limit(now) - self._looking

    def _is_due(self, step: int, cost: float, left: float) -> bool:
        """Whether a step is measured that costs so many seconds, of so many that are left."""
        if step < FIRST_STEPS and left >= cost:
            return True
        if step >= FIRST_STEPS and self.spacing.reaches(step):
            self.spacing.adapt(cost, left)
            return left >= cost
        return left >= cost and self.spacing.is_of_another(step)

    def _choose_between(self, step: int, now: float, share: float) -> None:
        """Choose the kind of the steps before the next one that may be measured."""
        cost, left = self._costs.cost_and_left(StepKind.GUARDED, self._time.by(now))
        left = min(left, self._below_limit(now))
        due = self.spacing.until_next(step)
        steps = 1.0
        if left < cost:
            self.kind = StepKind.SKIPPED
            steps = min(self._costs.until_paid(cost - left, share), _LONGEST_SKIPPED)
        else:
            self.kind = StepKind.GUARDED
            if cost:
                steps = min(left / cost, _LONGEST_GUARDED)
        self.run = max(min(math.floor(steps), due), 1)


class AllowedTime:
    """The seconds that watching may take by now.

    Args:
        share: The share of the run's time that watching may take; None for no limit.

    Attributes:
        first: Seconds of the run's first step, in which the hooks are attached.
        once: Seconds of what else happens once; see Note [What happens once].
        counting: Seconds that steps of every kind have taken: counting them, the checks of skipped
            ones, and what compiled code costs besides.
    """

    def __init__(self, share: float | None) -> None:
        self.share = share
        self.first = self.once = self.counting = 0.0
        self._began = 0.0

    def begin(self, now: float) -> None:
        """Start the clock."""
        self._began = now

    def limit(self, now: float) -> float:
        """Return the seconds that watching may take in all if the run ends at a time."""
        if self.share is None:
            return math.inf
        return max(self.share * (now - self._began), ALLOWANCE + self.besides)

    @property
    def besides(self) -> float:
        """The seconds of what happens once that a short run may take besides."""
        return min(self.first + self.once, _MOST_ONCE)

    def by(self, now: float) -> float:
        """Return the seconds allowed by a time for measuring and guarding."""
        if self.share is None:
            return math.inf
        by_share = self.share * (now - self._began)
        ramp = math.sqrt(min(by_share / ALLOWANCE, 1.0))
        allowed = max(by_share - self.besides, _FREE + (ALLOWANCE - _FREE) * ramp)
        return self._besides_counting(allowed)

    def earned(self, now: float) -> float:
        """Return the seconds that the share alone allows by a time for measuring and guarding."""
        if self.share is None:
            return math.inf
        return self._besides_counting(self.share * (now - self._began))

    def _besides_counting(self, allowed: float) -> float:
        return allowed - min(self.counting, _COUNTING * allowed)
