"""The state of a run at this moment: its recording, its findings, and whether it still runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from kedge.report.curves import Curve, losses_of
from kedge.report.head import is_written
from kedge.report.module_lines import ModuleLine, folded, lines
from kedge.rules.registry import check
from kedge.rules.rule import Finding, Rule
from kedge.store.follow import Follower, Pace
from kedge.store.recording import Recording

#: The seconds without a new step after which the lock of the writers is checked.
QUIET = 5.0
#: The pause between two runs of the rules: a multiple of the time they took, and the least one in
#: seconds.
RULES_PAUSE, LEAST_PAUSE = 10.0, 2.0


class RunState(Enum):
    """The state of a run."""

    WAITING = "waiting for the run to begin"
    RUNNING = "running"
    ENDED = "ended"
    FAILED = "failed"
    KILLED = "killed"
    UNCLEAR = "running, or killed"


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment.

    Attributes:
        recording: The recording so far.
        lines: The lines of its table.
        folds: The same, with alike blocks folded if there are many.
        findings: The findings when the rules were last run.
        pace: Recent steps per second; None while it is not known.
        losses: The losses that have a value.
    """

    recording: Recording
    lines: tuple[ModuleLine, ...]
    findings: tuple[Finding, ...]
    pace: float | None
    losses: tuple[Curve, ...] = ()
    folds: tuple[ModuleLine, ...] = ()


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
        self.state = RunState.WAITING
        self.snapshot: RunSnapshot | None = None
        self._clock = clock
        self._follower = Follower(path)
        self._pace = Pace()
        self._last_news = -QUIET
        self._unchecked = False
        self._check_from = 0.0

    def read(self) -> bool:
        """Read on; return whether anything is new.

        Raises:
            KedgeError: The recording cannot be read.
        """
        recording = self._follower.poll()
        if recording is not None:
            self._take(recording)
        checked = self._check_when_due()
        before, self.state = self.state, self._judged()
        return recording is not None or checked or self.state is not before

    def _take(self, recording: Recording) -> None:
        known, now = self.snapshot, self._clock()
        same_run = known is not None and known.recording.manifest is recording.manifest
        findings = known.findings if known is not None and same_run else ()
        if same_run:
            self._last_news = now
        else:
            # An existing recording is not news, so that one left by a killed run is recognized at
            # once.
            self._pace.forget()
            self._check_from, self._last_news = now, now - QUIET
        losses = tuple(curve for curve in losses_of(recording) if len(curve.steps))
        made = lines(recording)
        folds = tuple(folded(made, findings))
        self.snapshot = RunSnapshot(
            recording, made, findings, self._pace.at(recording, now), losses, folds
        )
        self._unchecked = True

    def _check_when_due(self) -> bool:
        if self.snapshot is None or not self._unchecked:
            return False
        start = self._clock()
        if start < self._check_from and self.snapshot.recording.end is None:
            return False
        findings = check(self.snapshot.recording, self._rules)
        folds = tuple(folded(self.snapshot.lines, findings))
        self.snapshot = replace(self.snapshot, findings=findings, folds=folds)
        took = self._clock() - start
        self._check_from = start + took + max(LEAST_PAUSE, RULES_PAUSE * took)
        self._unchecked = False
        return True

    def _judged(self) -> RunState:
        if self.snapshot is None:
            return RunState.WAITING
        end = self.snapshot.recording.end
        if end is not None:
            return RunState.FAILED if end.get("exit") else RunState.ENDED
        if self._clock() - self._last_news < QUIET:
            return RunState.RUNNING
        return _STATES[is_written(self.snapshot.recording)]


_STATES = {True: RunState.RUNNING, False: RunState.KILLED, None: RunState.UNCLEAR}
