"""The state of a run at this moment: its recording, its findings, and whether it still runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path

from kedge.report.shown_run import ShownRun
from kedge.report.what_ran import is_written
from kedge.rules.paced_check import PacedCheck
from kedge.rules.rule import Rule
from kedge.store.follow import Follower, Pace
from kedge.store.recording import Recording

#: The seconds without a new step after which the lock of the writers is checked.
QUIET = 5.0


class RunState(Enum):
    """The state of a run."""

    WAITING = "waiting for the run to begin"
    RUNNING = "running"
    ENDED = "ended"
    FAILED = "failed"
    KILLED = "killed"
    UNCLEAR = "running, or killed"


class RunReader:
    """A reader of a growing run.

    Args:
        path: The folder of its recording, which need not exist yet.
        rules: The rules to run; all of them if None.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        path: Path,
        rules: Sequence[Rule] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._rules = rules
        self._check = PacedCheck(rules, clock)
        self.state = RunState.WAITING
        self.shown_run: ShownRun | None = None
        self._clock = clock
        self._follower = Follower(path)
        self._pace = Pace()
        self._last_news = -QUIET
        self._unchecked = False

    def read(self) -> bool:
        """Read on; return whether anything is new.

        Raises:
            KedgeError: The recording cannot be read.
        """
        recording = self._follower.poll()
        if recording is not None:
            self._take(recording)
        checked = self._check_when_due()
        before = self.state
        self.state = self._judged()
        if self.shown_run is not None and self.state is RunState.KILLED:
            self.shown_run = replace(self.shown_run, written=False)
        return recording is not None or checked or self.state is not before

    def _take(self, recording: Recording) -> None:
        now = self._clock()
        known = self.shown_run
        if known is not None and known.recording.manifest is recording.manifest:
            self._last_news = now
            findings = known.findings
        else:
            # An existing recording is not news, so that one left by a killed run is recognized at
            # once.
            self._pace.forget()
            self._check.begin_again()
            self._last_news = now - QUIET
            findings = ()
        pace = self._pace.at(recording, now)
        self.shown_run = ShownRun(recording, findings, self._rules, pace=pace)
        self._unchecked = True

    def _check_when_due(self) -> bool:
        shown = self.shown_run
        if shown is None or not self._unchecked:
            return False
        if not self._check.is_due and shown.recording.end is None:
            return False
        findings = self._check.run(lambda: shown.recording)
        self.shown_run = replace(shown, findings=findings or ())
        self._unchecked = False
        return True

    def _judged(self) -> RunState:
        if self.shown_run is None:
            return RunState.WAITING
        end = self.shown_run.recording.end
        if end is not None and end.exit:
            return RunState.FAILED
        if end is not None:
            return RunState.ENDED
        if self._clock() - self._last_news < QUIET:
            return RunState.RUNNING
        return _STATES[is_written(self.shown_run.recording)]


_STATES = {True: RunState.RUNNING, False: RunState.KILLED, None: RunState.UNCLEAR}
