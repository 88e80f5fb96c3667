"""Watching the program that runs in this process, from its first import of torch to its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kedge.hooks.placing.own_warnings import ignore_warnings, show_warnings
from kedge.program.after_import import AfterImport
from kedge.stderr import Shield, reports_to
from kedge.watch.run.options import BEGINNING, ENDING, WatchOptions

if TYPE_CHECKING:
    from kedge.store.events import Position
    from kedge.watch.records.writer import StepSink
    from kedge.watch.run.position import PositionNotes, ProgramPosition
    from kedge.watch.totals import WatchSummary
    from kedge.watch.watcher import Watcher

FINDING = "finding where the error came", "the recording does not say it"


class Watching:
    """Watches a program without ever ending it: failures are reported, and the program goes on.

    Args:
        log: Where records go.
        order: The sites to watch, and how often.
        complain: Reports a failure to the user.
        holding: Receives the models, which are read after the program has ended.
        strict: Whether a failure here ends the program.

    Attributes:
        place: Returns the recording, or None as long as there is none; None without one.
        begun: Called when the watch has begun.
    """

    def __init__(
        self,
        log: StepSink,
        order: WatchOptions,
        complain: Callable[[str], None],
        *,
        holding: list[Any] | None = None,
        strict: bool = False,
    ) -> None:
        self.log = log
        self.order = order
        self._complain = complain
        self.place: Callable[[], Path | None] | None = None
        self.begun: Callable[[Watcher], None] = _nothing
        self._beginning = Shield(*BEGINNING, tell=complain, strict=strict)
        self._ending = Shield(*ENDING, tell=complain, strict=strict)
        self.watch: Watcher | None = None
        self.holding = holding
        self._entering = 0.0
        self._position: ProgramPosition | None = None
        self._notes: PositionNotes | None = None
        self._undo = ExitStack()
        self._import = AfterImport("torch", self._begin)

    def begin(self) -> None:
        """Watch as soon as the program has imported torch."""
        self._undo.enter_context(reports_to(self._complain))
        ignore_warnings()
        self._undo.callback(show_warnings)
        self._import.install()

    def note_position(self, folder: Path, rank: int, world: int) -> None:
        """Note from now on where the program is, in the recording of one of some ranks."""
        if self._notes is not None:
            self._notes.begin(folder, rank, world)

    def position_of(self, error: BaseException | None) -> Position | None:
        """Return where the error came that ended the program; None if that is not known."""
        if self._position is None or error is None or isinstance(error, SystemExit):
            return None
        finding = Shield(*FINDING, tell=self._complain)
        return finding(self._position.of_error, error)

    def finish(self) -> WatchSummary | None:
        """Remove every hook.

        Returns:
            The summary; None if the program never imported torch.
        """
        with self._undo:  # at last: until then reports and warnings go where they did
            self._import.remove()
            # A daemon thread may be importing torch just now.
            self._beginning.off = True
            if self.watch is None:
                return None
            if self._notes is not None:
                self._notes.end()
            self._ending(self.watch.__exit__, None, None, None)
            # Read before that call, whose time is not the program's.
            summary = self.watch.summary
            if self.watch.record.dump is not None:
                self.watch.record.dump.run_again()
            return summary

    @property
    def took(self) -> float:
        """Seconds that Kedge has taken since the program began, its imports included."""
        if self.watch is None:
            return self._entering
        return self._entering + self.watch.summary.watching

    @property
    def failed(self) -> bool:
        """Whether something failed, here or in a hook."""
        if self._beginning.failure is not None or self._ending.off:
            return True
        watch = self.watch
        if watch is None:
            return False
        first_step = watch.record.first_step
        return watch.failed or first_step.shield.off

    def _begin(self) -> None:
        self._beginning(self._enter)

    def _enter(self) -> None:
        began = perf_counter()
        # For the end, when the program may have changed what imports need; but not Rich, see
        # Note [Rich and the program's random numbers] in `kedge.watch.run.summary`.
        import kedge.rules.judgement
        import kedge.rules.project_config
        import kedge.watch.run.end_event  # noqa: F401
        from kedge.watch.run.begin import make_watch
        from kedge.watch.run.position import PositionNotes, ProgramPosition

        self.watch = make_watch(self.log, self.order, self.place)
        self.watch.models.holding = self.holding
        self._position = ProgramPosition(self.watch)
        self._notes = PositionNotes(self._position, self._complain)
        self.watch.__enter__()
        self.watch.tensors.saved = self.order.saved is not None
        self.watch.tensors.begin()
        self._entering = perf_counter() - began
        self.begun(self.watch)


def _nothing(_: Watcher) -> None:
    return None
