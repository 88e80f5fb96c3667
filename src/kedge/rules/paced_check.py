"""Rules that run again and again on a recording while it is being written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kedge.rules.registry import check
from kedge.rules.rule import Finding, Rule
from kedge.store.recording import Recording

#: The pause between two runs of the rules: a multiple of the time they took, and the least one in
#: seconds.
PAUSE, LEAST_PAUSE = 10.0, 2.0


class PacedCheck:
    """Runs rules on a growing recording, with pauses that keep them at a small share of the time.

    Args:
        rules: The rules to run; all of them if None.
        clock: Returns the time in seconds.
        pause: The pause after a run, as a multiple of the time that it took.
    """

    def __init__(
        self,
        rules: Sequence[Rule] | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: float = PAUSE,
    ) -> None:
        self.rules = rules
        self._clock = clock
        self._pause = pause
        self._from = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the pause after the last run is over."""
        return self._clock() >= self._from

    def begin_again(self) -> None:
        """Run at the next opportunity, as the recording is that of another run."""
        self._from = self._clock()

    def run(self, read: Callable[[], Recording | None]) -> tuple[Finding, ...] | None:
        """Run the rules, and begin the pause.

        Args:
            read: Returns the recording so far; None if there is nothing new in it. Its time counts,
                too.

        Returns:
            The findings; None if there is nothing new.
        """
        start = self._clock()
        found = None
        try:
            recording = read()
            if recording is not None:
                found = check(recording, self.rules)
        finally:
            took = self._clock() - start
            self._from = start + took + max(LEAST_PAUSE, self._pause * took)
        return found
