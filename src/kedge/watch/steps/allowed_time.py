"""The time that watching may take; see Note [The budget] in `kedge.watch.steps.budget`."""

from __future__ import annotations

import math

ALLOWANCE, FREE = 3.0, 0.5
"""Seconds that watching may take in any run, and those of them that are free at once."""
_COUNTING = 2 / 3
"""Largest part of the allowed time that counting steps, and compiling, may take from the other work."""


class AllowedTime:
    """The seconds that watching may take by now.

    Args:
        share: The share of the run's time that watching may take; None for no limit.

    Attributes:
        setup: Seconds of the run's first step and its end, which are allowed besides.
        counting: Seconds that steps of every kind have taken: counting them, and what compiled code
            costs besides.
    """

    def __init__(self, share: float | None) -> None:
        self.share = share
        self.setup = self.counting = 0.0
        self._began = 0.0

    def begin(self, now: float) -> None:
        """Start the clock."""
        self._began = now

    def limit(self, now: float) -> float:
        """Return the seconds that watching may take in all if the run ends at a time."""
        return math.inf if self.share is None else max(self.share * (now - self._began), ALLOWANCE)

    def by(self, now: float) -> float:
        """Return the seconds allowed by a time for measuring and guarding."""
        if self.share is None:
            return math.inf
        passed = now - self._began
        ramp = math.sqrt(min(passed * self.share / ALLOWANCE, 1.0))
        setup = min(self.setup, ALLOWANCE - FREE)
        allowed = max(self.share * passed, setup + FREE + (ALLOWANCE - setup - FREE) * ramp) - setup
        return self._besides_counting(allowed)

    def earned(self, now: float) -> float:
        """Return the seconds that the share alone allows by a time for measuring and guarding."""
        if self.share is None:
            return math.inf
        return self._besides_counting(self.share * (now - self._began))

    def _besides_counting(self, allowed: float) -> float:
        return allowed - min(self.counting, _COUNTING * allowed)
