"""The distance between measured steps.

# Note [Common steps]
Two runs that are to be compared, and the ranks of one run, have a budget each, and yet should
measure the same steps. So after the first ones the distance between two measured steps is `every`
times a power of two, which doubles when the budget does not pay for a measured step, and each
measured step is a multiple of this distance: a run that measures more often also measures the steps
of the others.

# Note [Landmarks]
A run whose measured steps are dear is still to be judged by its beginning and by its course, however
long it turns out to be. So some steps are measured if the limit of the whole run pays for them at
once: five more of the first forty, and later ever fewer, at twice and at three times the powers of
two of `every`, such as 40, 60, 80, 120, 160 and 240. The first five are measured even if they cost
more than that, up to ten seconds in all.

# Note [Steps of the other optimizers]
An optimizer that does not end the run's steps may step in one of five, and never in a measured one:
so the generator whose critic steps five times as often. So the steps in which it should make its
own steps number 0, `distance`, twice `distance` and so on are measured as well. They follow from
the number of steps between its last two; to learn it, up to `distance` steps after its first one
are measured.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_STEPS = 40
"""Steps that are all measured if that is cheap."""
ALWAYS = 5
"""Steps that are measured even if they cost more than the limit."""
_EARLY = (8, 12, 16, 24, 32)
"""Other landmarks in the first steps."""


class Spacing:
    """Which steps may be measured; see Note [Common steps].

    Args:
        every: The smallest distance between two measured steps.
        others: Returns the number of steps from one step to the next that is measured for another
            optimizer, given the step and the distance, None if none is expected; see Note [Steps of
            the other optimizers].

    Attributes:
        distance: The present distance.
    """

    def __init__(self, every: int, others: Callable[[int, int], int | None]) -> None:
        self.every = self.distance = every
        self.others = others
        self._asked = 0

    def until_next(self, step: int) -> int:
        """Return the number of steps from one step to the next that may be measured."""
        if step < FIRST_STEPS:
            return 1
        own = self.distance - step % self.distance
        others = self.others(step, self.distance) or own
        return min(own, others, self._next_landmark(step) - step)

    def is_landmark(self, step: int) -> bool:
        """Whether a step is measured before others; see Note [Landmarks]."""
        if step < FIRST_STEPS:
            return step < ALWAYS or step in _EARLY
        return step == self._next_landmark(step - 1)

    def _next_landmark(self, step: int) -> int:
        """Return the first landmark after a step that is not one of the first."""
        units = step // self.every
        doubled = 1 << units.bit_length()
        tripled = 3 << max(units.bit_length() - 2, 0)
        if tripled > units:
            return self.every * tripled
        return self.every * doubled

    def is_due(self, step: int) -> bool:
        """Whether a step is measured if there is no limit."""
        return step % self.every == 0 or self.is_of_another(step)

    def is_of_another(self, step: int) -> bool:
        """Whether a step may be measured for another optimizer than the one that ends the steps."""
        return self.others(step, self.distance) == 0

    def reaches(self, step: int) -> bool:
        """Whether a step that may be measured was reached since the last call."""
        before = self._asked
        self._asked = step
        return step // self.distance != before // self.distance

    def adapt(self, cost: float, left: float) -> None:
        """Adapt the distance to the cost of a measured step, and to the seconds that are left for it."""
        if left < cost:
            self.distance *= 2
        elif left > 2 * cost:
            self.distance = max(self.distance // 2, self.every)
