"""What ran: the command, its steps and its time, and whether it still runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kedge.errors import BeingWritten, RecordingError
from kedge.short_text import counted, percent, seconds
from kedge.shown_text import typed, visible
from kedge.store.recording import Recording
from kedge.store.writing.lock import LOCK, check_written

#: The name of a program that its recording does not name.
UNNAMED = "a program without a name"


def command_of(manifest: Mapping[str, Any]) -> str:
    """Return the command of a run, or its script; empty if neither is known."""
    command = manifest.get("command")
    if command:
        return typed(*command)
    return visible(str(manifest.get("script") or ""))


def is_written(recording: Recording) -> bool | None:
    """Whether a process still writes a recording; None if it has an end, or that is not known."""
    if recording.end is not None or not (recording.path / LOCK).exists():
        return None
    try:
        check_written(recording.path)
    except BeingWritten:
        return True
    except RecordingError:
        return None
    return False


def amounts(recording: Recording) -> Iterator[str]:
    """Yield how many steps there were, how long they took, and what part of it watching did."""
    end = recording.end
    sampled = len(recording.steps)
    if end is None:
        amount = f"{counted(sampled, 'step')} measured"
        if is_written(recording) is not False:
            amount += " so far"
        yield amount
        return
    steps = sampled if end.steps is None else end.steps
    yield f"{counted(steps, 'step')}, {sampled:,} measured"
    if end.seconds and end.watching is not None:
        share = percent(end.watching / end.seconds)
        yield f"{seconds(end.seconds)}, {share} of it for watching"
    elif end.seconds:
        yield seconds(end.seconds)
