"""The event that ends a recording."""

from __future__ import annotations

from typing import Any

from kedge.program.ending import text_of
from kedge.watch.totals import WatchSummary


def end_of(summary: WatchSummary, status: int, error: BaseException | None) -> dict[str, Any]:
    """Return the event that ends a recording.

    Args:
        summary: The figures of the run.
        status: The exit status of the program.
        error: The error that ended it; None if it ran to its last line.
    """
    uncaught = None if isinstance(error, SystemExit) else error
    return {
        "kind": "end",
        "exit": status,
        "steps": summary.steps,
        "sampled": summary.sampled,
        "seconds": summary.seconds,
        "watching": summary.watching,
        "slowdown": summary.watching / summary.seconds if summary.seconds else None,
        "levels": summary.levels,
        "error": text_of(uncaught) if uncaught is not None else None,
    }
