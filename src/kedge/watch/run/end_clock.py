"""The time of the work after the end of a program."""

from __future__ import annotations

import time
from collections.abc import Callable

#: The seconds that the work may take however short the program was.
LEAST_END = 10.0


class EndClock:
    """Times the work after the end of the program.

    It counts as watching, and may not take longer than the program.

    Args:
        took: Seconds that Kedge has taken until now.
        passed: Seconds that have passed until now, those of the program included.
        elsewhere: Whether the work is done by another process than the program's, which it costs
            nothing.
        now: Returns the time in seconds.

    Attributes:
        limit: The seconds that the work may take: the program's own, and ten in any case.
    """

    def __init__(
        self,
        took: float,
        passed: float,
        *,
        elsewhere: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._took = took
        self._passed = passed
        self._elsewhere = elsewhere
        self._now = now
        self._began = now()
        self.limit = max(LEAST_END, passed - took)

    def is_over(self) -> bool:
        """Whether the work has taken as long as it may."""
        return self._now() - self._began > self.limit

    def cost(self) -> tuple[float, float]:
        """Return the seconds that Kedge has taken so far, and those that passed in all."""
        ending = 0.0 if self._elsewhere else self._now() - self._began
        return self._took + ending, self._passed + ending
