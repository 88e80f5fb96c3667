"""The distance between measured steps.

# Note [Common steps]
Two runs that are to be compared, and the ranks of one run, have a budget each, and yet should measure the same steps.
So after the first ones the distance between two measured steps is `every` times a power of two, which doubles when the
budget does not pay for a measured step, and each measured step is a multiple of this distance: a run that measures more
often also measures the steps of the others.
"""

from __future__ import annotations


class Spacing:
    """Which steps may be measured; see Note [Common steps].

    Args:
        every: The smallest distance between two measured steps.

    Attributes:
        distance: The present distance.
    """

    def __init__(self, every: int) -> None:
        self.every = self.distance = every
        self._asked = 0

    def until_next(self, step: int) -> int:
        """Return the number of steps from one step to the next that may be measured."""
        return self.distance - step % self.distance

    def reaches(self, step: int) -> bool:
        """Whether a step that may be measured was reached since the last call."""
        asked, self._asked = self._asked, step
        return step // self.distance != asked // self.distance

    def adapt(self, cost: float, left: float) -> None:
        """Adapt the distance to the cost of a measured step, and to the seconds that are left for it."""
        if left < cost:
            self.distance *= 2
        elif left > 2 * cost:
            self.distance = max(self.distance // 2, self.every)
