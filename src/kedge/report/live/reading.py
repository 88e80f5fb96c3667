"""What is known of a run at this moment: its recording, its findings, and whether it still runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from kedge.errors import RecordingError
from kedge.file_lock import check_written
from kedge.report.curves import Curve, losses_of
from kedge.report.module_lines import Line, lines
from kedge.rules.registry import check
from kedge.rules.rule import Finding, Rule
from kedge.store.follow import Follower
from kedge.store.recording import Recording

#: After so many seconds without a new step it is looked whether somebody still writes.
QUIET = 5.0
#: The pace is that of the last so many seconds.
PACED_OVER = 30.0
#: The rules are run again after so many times as long as they took, so that they never take up much of the time.
RULES_PAUSE, LEAST_PAUSE = 10.0, 2.0


class State(Enum):
    """How a run is doing."""

    WAITING = "waiting for the run to begin"
    RUNNING = "running"
    ENDED = "ended"
    FAILED = "failed"
    KILLED = "killed"


@dataclass(frozen=True)
class Glance:
    """What is known of a run at one moment.

    Attributes:
        recording: All that was recorded so far.
        lines: The lines of its table.
        findings: What the rules said when they were last run.
        pace: Steps in a second, lately; None while it is not known.
        losses: Those that have a value.
    """

    recording: Recording
    lines: tuple[Line, ...]
    findings: tuple[Finding, ...]
    pace: float | None
    losses: tuple[Curve, ...] = ()


class Reader:
    """Follows a run.

    Args:
        path: The folder of its recording, which need not be there yet.
        rules: The rules to run; all of them if None.
        clock: Gives the time in seconds.
    """

    def __init__(
        self, path: Path, rules: Sequence[Rule] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = path
        self._rules = rules
        self.state = State.WAITING
        self.glance: Glance | None = None
        self._clock = clock
        self._follower = Follower(path)
        self._reached: deque[tuple[float, int]] = deque()
        self._last_news = -QUIET
        self._unchecked = False
        self._check_from = 0.0

    def read(self) -> bool:
        """Read on, and tell whether anything is new.

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
        known, now = self.glance, self._clock()
        same_run = known is not None and known.recording.manifest is recording.manifest
        findings = known.findings if known is not None and same_run else ()
        if same_run:
            self._last_news = now
        else:
            # What was there before is no news, so that a recording that was left by a kill is told at once.
            self._reached.clear()
            self._check_from, self._last_news = now, now - QUIET
        losses = tuple(curve for curve in losses_of(recording) if len(curve.steps))
        self.glance = Glance(recording, lines(recording), findings, self._pace(recording, now), losses)
        self._unchecked = True

    def _check_when_due(self) -> bool:
        if self.glance is None or not self._unchecked:
            return False
        start = self._clock()
        if start < self._check_from and self.glance.recording.end is None:
            return False
        self.glance = replace(self.glance, findings=check(self.glance.recording, self._rules))
        took = self._clock() - start
        self._check_from = start + took + max(LEAST_PAUSE, RULES_PAUSE * took)
        self._unchecked = False
        return True

    def _pace(self, recording: Recording, now: float) -> float | None:
        """Tell how many steps were done in a second, in the last seconds or, after the end, in all."""
        if recording.end is not None:
            steps, seconds = recording.end.get("steps"), recording.end.get("seconds")
            return steps / seconds if steps and seconds else None
        if not len(recording.steps):
            return None
        reached = self._reached
        reached.append((now, int(recording.steps[-1])))
        while len(reached) > 2 and now - reached[1][0] > PACED_OVER:
            reached.popleft()
        (start, first), (end, last) = reached[0], reached[-1]
        return (last - first) / (end - start) if end > start and last > first else None

    def _judged(self) -> State:
        if self.glance is None:
            return State.WAITING
        end = self.glance.recording.end
        if end is not None:
            return State.FAILED if end.get("exit") else State.ENDED
        if self._clock() - self._last_news < QUIET:
            return State.RUNNING
        return State.RUNNING if _is_written(self.path) else State.KILLED


def _is_written(folder: Path) -> bool:
    """Tell whether a process writes a recording; where that cannot be known, it is taken to."""
    try:
        check_written(folder)
    except RecordingError:
        return True
    return False
