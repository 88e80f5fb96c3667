"""The event that ends a recording."""

from __future__ import annotations

from kedge.program.ending import text_of
from kedge.store.events import EndEvent
from kedge.watch.totals import WatchSummary


def end_of(summary: WatchSummary, status: int, error: BaseException | None) -> EndEvent:
    """Return the event that ends a recording.

    Args:
        summary: The figures of the run.
        status: The exit status of the program.
        error: The error that ended it; None if it ran to its last line.
    """
    uncaught = None if isinstance(error, SystemExit) else error
    return EndEvent(
        exit=status,
        steps=summary.steps,
        sampled=summary.sampled,
        seconds=summary.seconds,
        watching=summary.watching,
        slowdown=summary.watching / summary.seconds if summary.seconds else None,
        levels=summary.levels,
        error=text_of(uncaught) if uncaught is not None else None,
    )
