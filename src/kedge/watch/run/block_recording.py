"""The recording of a watched block: its sinks, the findings, and the last lines for the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kedge.errors import STOPPED, TrainingStopped
from kedge.rules.project_config import configured_rules
from kedge.rules.registry import check
from kedge.rules.rule import Finding, Rule
from kedge.stderr import Shield
from kedge.store.recording import Recording
from kedge.watch.run.begin import begin_recording
from kedge.watch.run.end_clock import EndClock
from kedge.watch.run.end_event import end_of
from kedge.watch.run.ranks import LaunchedRank
from kedge.watch.run.recorder import RecordingSink
from kedge.watch.run.sinks import RunSink, Sinks
from kedge.watch.run.summary import CHECKING, last_words
from kedge.watch.totals import WatchSummary


class BlockRecording:
    """One recording of a block, which makes a further one each time that it begins.

    Args:
        name: The path of the recording, as the user reads it.
        number: Its number among those of the block.
        launch: This process's rank.
        manifest: Its description.
        force: Whether an old recording may be replaced.
        sinks: Receive the data too.
        complain: Reports failures to the user.

    Attributes:
        sinks: Receives the data.
        is_over: Whether the block has ended.
    """

    def __init__(
        self,
        name: Path,
        number: int,
        launch: LaunchedRank,
        manifest: Mapping[str, Any],
        force: bool,
        sinks: Iterable[RunSink],
        complain: Callable[[str], None],
    ) -> None:
        self.name = name
        self.number = number
        self.is_over = False
        self._launch = launch
        self._complain = complain
        place = name.absolute()
        recorder = RecordingSink(
            place, lambda: begin_recording(place, manifest, force), complain, waits=launch.meets
        )
        self.sinks = Sinks(recorder, sinks, complain)
        self.sinks.find = self._find

    def by_rank(self, text: str) -> str:
        """Return a message to the user, which names the rank unless that is the first."""
        if self._launch.leads:
            return text
        return f"rank {self._launch.rank}: {text}"

    def findings(self, rules: Iterable[Rule] | None = None) -> tuple[Finding, ...]:
        """Run rules on the recording so far; all configured rules if none are given."""
        recording = self.recorded
        if recording is None:
            return ()
        if rules is None:
            rules = configured_rules()
        return check(recording, rules)

    @property
    def recorded(self) -> Recording | None:
        """What is written so far; None before the first step."""
        recorder = self.sinks.recorder
        if recorder.writer is None:
            return None
        return Recording.open(recorder.place)

    def _find(self) -> tuple[Finding, ...]:
        if self.is_over:
            self._launch.await_others(self.sinks.recorder.place)
        return Shield(*CHECKING, tell=self._complain)(self.findings) or ()

    def close(self, summary: WatchSummary, error: BaseException | None) -> None:
        """Write the end.

        Args:
            summary: The figures of the run.
            error: The error that ended the block.
        """
        status = int(error is not None)
        if isinstance(error, TrainingStopped):
            status = STOPPED
        self.sinks.event(end_of(summary, status, error))
        self.sinks.close()

    def last_words(self, summary: WatchSummary, end: EndClock) -> Iterator[str]:
        """Yield the last lines for the user, on the first rank only.

        Args:
            summary: The figures of the run.
            end: The clock of the work after it.
        """
        if self._launch.leads:
            self._launch.await_others(self.sinks.recorder.place)
            yield from last_words(str(self.name), self.sinks.recorder, summary, end=end)
