"""How much of a run is looked at: what watching costs, and what that allows for the next step.

# Note [The budget]
Watching may take a given share of the program's time. Every step brings that share of its own time in, and every
step that was looked at is paid for with what that took. Three purses share the income, so that no kind of
looking starves another: one for steps measured in full, which are dear and seldom, one for norms, and one for the
mere search for values that are not finite, which is cheap and goes on in every step if it can. A purse that is
in debt waits; one that is full passes its income on, so that a long pause of the program buys no burst.

What a step took is what Kedge timed itself, or more: code that runs once in a while finds nothing of itself in the
processor's memories, and throws out what is the program's. So a step's length, with what went before to wake and with the two
steps that follow, is compared with that of the steps that were not looked at, and the mean difference counts, up to three times
what was timed. Where all can be paid for as timed, but could not if each took three times that, some steps are let alone now and
then, to compare with. Where all can be paid for even so, it is compared with what the light ones took without what was timed in
them. The first step also attaches the hooks, and the end of a run takes about as long; a fifth of the income goes to both until
they are paid.

# Note [Glances]
Where a step takes less than a millisecond, putting up the hooks of a light step, and taking them down, takes longer
than the step. So where a light step could be paid for less often than once in eight, there are glances instead: some
gradients are looked at behind the optimizer's step, without any hook. They take a tenth of the time, so a value that
is not finite is seen after some fifteen steps; what a module returned is not seen.

# Note [Common steps]
Two runs that are to be compared, and the ranks of one, pace themselves, and yet should measure the same steps in
full. So the distance between two full steps is `every` times a power of two, which doubles when there is not enough
to pay for one, and each full step is a multiple of it: whoever measures more often measures those of the others
too. Where a multiple passes while nothing is looked at, the next step that is looked at is taken.
"""

from __future__ import annotations

import time
from collections import deque
from enum import IntEnum
from statistics import median


class Level(IntEnum):
    """What is done in a step: nothing, a glance at its end, a search for values that are not finite, all norms, or everything."""

    OFF = 0
    GLANCE = 1
    LOOK = 2
    NORM = 3
    FULL = 4


_SHARES = {Level.LOOK: 0.35, Level.NORM: 0.2, Level.FULL: 0.45}
_LEARNING = 0.25
"""How much of a step's cost goes into the running mean of its kind."""
_MOST = 3.0
"""How many times what was timed a step can be taken to have cost."""
_GRANTED = 8
"""How many full steps that were asked for are made, whether they can be paid or not."""
_BARE = 15
"""How many stretches of steps that were not looked at are remembered, and how many light steps."""
_FEW = 5
"""How many light steps say what a step takes."""
_APART, _FAR_APART = 8, 200
"""How many steps that were looked at lie between those let alone to compare with: until a few are known, and after that."""
_REPAID = 0.2
"""Which share of the income pays for the first step and the end, until they are paid for."""
_BOTH_ENDS = 2.0
"""What the first step took, and as much again for the end, which writes what is left and asks the rules."""
_SETTLING = 2
"""How many steps after one that was looked at still take longer for it."""
_RARE = 8
"""How seldom a light step may be affordable for there to be any; see Note [Glances]."""
_FORGOTTEN = 0.99
"""How much a glance leaves of what light steps are known to cost: in the end one is tried again."""


class Pace:
    """Decides how closely each step is looked at; see Note [The budget].

    Args:
        every: One step in this many is measured in full at most; without a budget, exactly one.
        budget: The share of the program's time that watching may take, such as 0.03; None for no limit.

    Attributes:
        level: What is done in the step under way.
        counts: How many steps had which level.
        seconds: What watching took in all steps that ended.
        wake: Until when steps are not looked at; their ends need not be told.
        heard: Every step is heard to end, by an optimizer, also while nothing is looked at.
        glancing: Gradients can be glanced at when a step ends.
        settling: How many steps after one that was looked at are still to be timed with it.
    """

    def __init__(self, every: int, budget: float | None) -> None:
        self.every, self.budget = every, budget
        self.level = Level.FULL
        self.counts = dict.fromkeys(Level, 0)
        self._purses = dict.fromkeys(_SHARES, 0.0)
        self.seconds = 0.0
        self._timed: dict[Level, float] = {}
        self._longer: dict[Level, float] = {}
        self._after: dict[Level, float] = {}
        self._bare: deque[float] = deque(maxlen=_BARE)
        self._light: deque[float] = deque(maxlen=_BARE)
        self._looked = 0
        self._debt = 0.0
        self._spacing = 1
        self._asked = 0
        self._wishes, self._wished = 0, False
        self._step = 0
        self._mark, self._earned = (0.0, 0.0), 0.0
        self.wake = 0.0
        self.heard = self.glancing = False
        self.settling, self._settles = 0, Level.OFF
        self._glances, self._glanced = 0, 0.0
        self._chosen: Level | None = None
        self._promised = False
        self._device = 0.0

    def begin(self, now: float, cost: float) -> None:
        """Begin to count the program's time, in seconds, and what watching takes of it."""
        self._mark, self._earned = (now, cost), now

    def ended(self, step: int, now: float, cost: float, heard: tuple[float, float] | None = None) -> Level:
        """Count a step, and those before it in which nothing was done, and choose what is done in the next one.

        Args:
            step: The step that ended.
            now: The time.
            cost: What watching has taken so far.
            heard: Both, when the end was heard; what a sleeper has done since is done for the step to come.

        Returns:
            The level of the step to come.
        """
        level, (then, paid) = self.level, self._mark
        if level is Level.OFF and heard is not None:
            now, cost = heard
        self._mark = now, cost
        steps, lasted, spent = step + 1 - self._step, now - then, cost - paid
        self._step = step + 1
        if level is Level.OFF:
            self._count_off(steps, lasted - spent)
        else:
            self.counts[level] += steps
            if self.counts[Level.FULL] > 1 or level is not Level.FULL:
                spent = self._pay(level, spent, lasted)
            else:
                self._debt += _BOTH_ENDS * spent
        self.seconds += spent
        wished, self._wished = self._wished, False
        if self.budget is None:
            self.level = Level.FULL if (step + 1) % self.every == 0 else Level.NORM
            return self.level
        self._earn(self.budget * max(now - self._earned - spent, 0.0) - (spent if level is Level.OFF else 0.0))
        self._earned, self.settling, self.wake = now, 0, 0.0
        if self._promised:  # nobody came to make the glance
            self.glancing = self._promised = False
        chosen, self._chosen = self._chosen, None
        self.level = Level.FULL if wished else self._affordable(step + 1) if chosen is None else chosen
        self._looked = 0 if level is Level.OFF else self._looked + 1
        if self.level in {Level.OFF, Level.GLANCE} or self._may_hide(self.level, self.budget):
            self._fall_asleep(level, now)
        return self.level

    def _count_off(self, steps: int, lasted: float) -> None:
        """Count a stretch of steps that were not looked at."""
        self.counts[Level.OFF] += steps - self._glances
        if steps > 0:
            self._bare.append((lasted - self._glanced) / steps)
        self._glances, self._glanced = 0, 0.0

    def _may_hide(self, level: Level, budget: float) -> bool:
        """Tell whether it is time to let a step alone, because what a light one takes may be more than can be paid for."""
        if self._looked < (_APART if len(self._bare) < _FEW else _FAR_APART) or not self._light:
            return False
        return level in {Level.LOOK, Level.NORM} and _MOST * self._timed.get(level, 0.0) > budget * median(self._light)

    def _fall_asleep(self, level: Level, now: float) -> None:
        if self.level is Level.OFF and self.budget is not None:  # else there is enough already, and one step passes
            self.wake = now + self._idle(self._step, self.budget)
        self.level, self._promised = Level.OFF, self.level is Level.GLANCE
        if self.heard and level is not Level.OFF:
            self.settling, self._settles, self.wake = _SETTLING, level, 0.0

    def settled(self, now: float, cost: float) -> None:
        """Count a step that was not looked at, after one that was, which the last of these charges with what they took longer."""
        self.settling -= 1
        if self.settling:
            return
        (then, _), self._mark, level = self._mark, (now, cost), self._settles
        self._step += _SETTLING
        self.counts[Level.OFF] += _SETTLING
        if not self._bare:
            return
        longer = max(now - then - _SETTLING * median(self._bare), 0.0)
        _learn(self._after, level, min(longer, _MOST * self._within(level)))
        self._purses[level] -= self._after[level]
        self.seconds += self._after[level]

    def rise(self, step: int, now: float) -> Level:
        """Choose what is done when a step has ended at whose end it was time to wake.

        Args:
            step: The step that ended.
            now: The time.

        Returns:
            OFF to sleep on, GLANCE for a glance at this step, or else the level of the step to come, after `ended`.
        """
        self._promised = False
        if self.budget is None:
            return Level.OFF
        self._earn(self.budget * (now - self._earned))
        self._earned = now
        level = self._affordable(step + 1)
        if level is Level.OFF:
            self.wake = now + self._idle(step + 1, self.budget)
        self._chosen = level if level > Level.GLANCE else None
        return level

    def glanced(self, step: int, began: float, now: float) -> None:
        """Pay for a glance at a step, and sleep on."""
        seconds = now - began
        self.counts[Level.GLANCE] += 1
        self._glances, self._glanced, self.seconds = self._glances + 1, self._glanced + seconds, self.seconds + seconds
        _learn(self._timed, Level.GLANCE, seconds)
        self._purses[Level.LOOK] -= self._timed[Level.GLANCE]
        for means in (self._timed, self._longer, self._after):
            if Level.LOOK in means:
                means[Level.LOOK] *= _FORGOTTEN
        if self.budget is not None:
            self.wake = now + self._idle(step + 1, self.budget)

    def rouse(self, step: int, level: Level, now: float, cost: float) -> None:
        """Look at the step under way in the midst of it, and count those before it in which nothing was done."""
        if self.level is Level.OFF:
            self._chosen, wished = None, self._wished
            self.ended(step - 1, now, cost)
            self._wished = wished
        self.level, self.wake, self.settling = level, 0.0, 0

    def wish(self) -> bool:
        """Ask for the next step to be full; within a budget that is granted a few times, and then where it can be paid."""
        self._wishes += 1
        if self.budget is not None:
            self._wished |= self._wishes <= _GRANTED or self._purses[Level.FULL] >= 0
        return self._wished

    def charge(self, device: float) -> None:
        """Charge what watching has taken so far on devices, in seconds; full steps take nearly all of it."""
        late, self._device = device - self._device, device
        self.seconds += late
        self._purses[Level.FULL] -= late

    def total(self, cost: float) -> float:
        """What watching took in all, with the step under way, of which `cost` has been timed so far."""
        return self.seconds + cost - self._mark[1]

    def cost(self, level: Level) -> float:
        """What a step of this level takes, in seconds; 0 if there was none."""
        return self._within(level) + self._after.get(level, 0.0)

    def _within(self, level: Level) -> float:
        """What it takes until its end."""
        timed = self._timed.get(level, 0.0)
        return min(max(self._longer.get(level, timed), timed), _MOST * timed)

    def _pay(self, level: Level, timed: float, lasted: float) -> float:
        if level is not Level.FULL:
            self._light.append(lasted - timed)
        others = self._bare or (self._light if len(self._light) >= _FEW else None)
        longer = lasted - median(others) if others else timed
        _learn(self._timed, level, timed)
        _learn(self._longer, level, longer, self._timed[level])
        self._purses[level] -= self._within(level)
        return self._within(level)

    def _earn(self, income: float) -> None:
        repaid = min(self._debt, _REPAID * max(income, 0.0))
        self._debt -= repaid
        income, spare = income - repaid, 0.0
        for level, share in _SHARES.items():
            spare = self._put(level, income * share + spare)
        self._put(Level.NORM, spare)

    def _put(self, level: Level, amount: float) -> float:
        """Put something into a purse, which holds what one step costs; return what is left over."""
        self._purses[level] += amount
        over = max(self._purses[level] - self.cost(self._kind(level)), 0.0)
        self._purses[level] -= over
        return over

    def _kind(self, level: Level) -> Level:
        """What is done for the money of a level: light steps, or glances in their place; see Note [Glances]."""
        if level is not Level.LOOK or not self.glancing or not self._bare or self.budget is None:
            return level
        often = self.cost(level) <= _RARE * _SHARES[level] * self.budget * median(self._bare)
        return level if often else Level.GLANCE

    def _affordable(self, step: int) -> Level:
        if self._full_is_due(step):
            return Level.FULL
        level = next((level for level in (Level.NORM, Level.LOOK) if self._purses[level] >= 0), Level.OFF)
        return self._kind(level)

    def _full_is_due(self, step: int) -> bool:
        """Tell whether a step is measured in full; see Note [Common steps]."""
        purse, distance = self._purses[Level.FULL], self.every * self._spacing
        asked, self._asked = self._asked, step
        if step // distance == asked // distance:
            return False
        if purse < 0:
            self._spacing *= 2
        elif purse > self.cost(Level.FULL) / 2:
            self._spacing = max(self._spacing // 2, 1)
        return purse >= 0

    def _idle(self, step: int, budget: float) -> float:
        """Give the seconds until there is enough for a look, for norms, or for a full step that is due."""
        waits = [-self._purses[each] / (share * budget) for each, share in _SHARES.items() if self._purses[each] < 0]
        if self._purses[Level.FULL] >= 0 and self._bare:
            distance = self.every * self._spacing
            waits.append((distance - step % distance) * median(self._bare))
        # To ask costs something itself: no sooner than half of what the cheapest look costs has come in.
        return max(min(waits, default=0.0), self.cost(self._kind(Level.LOOK)) / (2 * budget))


def _learn(means: dict[Level, float], level: Level, value: float, least: float = 0.0) -> None:
    """Take a value into a running mean, but none too far from it on either side; a step may be slow for reasons of its own.

    Args:
        means: The means.
        level: Of what kind of step.
        value: What this one took.
        least: Values may be as far from zero as this in any case.
    """
    if level not in means:
        means[level] = value
        return
    known = means[level]
    far = (_MOST - 1) * max(abs(known), least)
    means[level] = known + _LEARNING * min(max(value - known, -far), far)


def unit() -> float:
    """Estimate the seconds that PyTorch takes to call a hook of a module: some 20 calls of a Python function.

    No module is called for it, as the program may have hooks on all of them.
    """
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(50):
            _nothing()
        rounds.append((time.perf_counter() - start) / 50)
    return 20 * min(rounds)


def _nothing() -> None:
    """Do nothing."""
