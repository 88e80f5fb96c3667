"""The event that ends a recording."""

from __future__ import annotations

from kedge.program.ending import text_of
from kedge.store.events import EndEvent, Position
from kedge.watch.totals import WatchSummary


def end_of(
    summary: WatchSummary,
    status: int,
    error: BaseException | None,
    position: Position | None = None,
) -> EndEvent:
    """Return the event that ends a recording.

    Args:
        summary: The figures of the run.
        status: The exit status of the program.
        error: The error that ended it; None if it ran to its last line.
        position: Where that error came; None if it is not known.
    """
    slowdown = None
    if summary.seconds:
        slowdown = summary.watching / summary.seconds
    text = None
    if error is not None and not isinstance(error, SystemExit):
        text = text_of(error)
    return EndEvent(
        exit=status,
        steps=summary.steps,
        sampled=summary.sampled,
        seconds=summary.seconds,
        watching=summary.watching,
        slowdown=slowdown,
        levels=summary.levels,
        error=text,
        position=position,
    )
