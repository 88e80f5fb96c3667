"""The head of a report: the command, its start, its device, and the cost of watching."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from rich.text import Text

from kedge.errors import BeingWritten, RecordingError
from kedge.report.positions import last_positions, ranks_named
from kedge.short_text import counted, percent, seconds
from kedge.shown_text import typed, visible
from kedge.store.events import EndEvent, StoppedEvent
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


def head(recording: Recording) -> Iterator[Text]:
    """Yield the lines of a report's head."""
    manifest = recording.manifest
    yield Text(command_of(manifest) or UNNAMED, "bold")
    for parts in (_circumstances(manifest), _watched(recording), _amounts(recording)):
        line = " · ".join(parts)
        if line:
            yield Text(line)
    yield from _troubles(recording)


def _circumstances(manifest: Mapping[str, Any]) -> Iterator[str]:
    if manifest.get("device"):
        yield str(manifest["device"])
    if manifest.get("torch"):
        yield f"torch {manifest['torch']}"
    if manifest.get("python"):
        yield f"Python {manifest['python']}"
    if manifest.get("started"):
        yield f"started {_moment(manifest['started'])}"
    if manifest.get("world", 1) > 1:
        yield f"rank {manifest.get('rank', 0)} of {manifest['world']}"


def _moment(started: str) -> str:
    try:
        moment = datetime.fromisoformat(started)
    except ValueError:
        return started
    return f"{moment:%Y-%m-%d %H:%M} {moment.tzname() or ''}".rstrip()


def _watched(recording: Recording) -> Iterator[str]:
    for root in recording.roots:
        yield f"{visible(root.title)}: {counted(root.parameters, 'parameter')}"
    yield counted(len(recording.sites), "site")


def _amounts(recording: Recording) -> Iterator[str]:
    end = recording.end
    sampled = len(recording.steps)
    if end is None:
        yield f"{counted(sampled, 'step')} measured so far"
        return
    steps = sampled if end.steps is None else end.steps
    yield f"{counted(steps, 'step')}, {sampled:,} measured"
    if end.seconds and end.watching is not None:
        share = percent(end.watching / end.seconds)
        yield f"{seconds(end.seconds)}, {share} of it for watching"
    elif end.seconds:
        yield seconds(end.seconds)


def lost_ranks(recording: Recording) -> Iterator[str]:
    """Yield the ranks that recorded nothing, and those without an end though others have one."""
    world = int(recording.manifest.get("world") or 1)
    ended = {recording.rank_of(end) for end in recording.of(EndEvent)}
    if world == 1 or not ended:
        return
    ranks = set(recording.ranks)
    absent = sorted(set(range(world)) - ranks)
    if absent:
        yield f"{ranks_named(absent)} recorded nothing"
    cut = sorted(ranks - ended)
    if cut:
        yield f"{ranks_named(cut)} have no recorded end: killed, or still running"


def stopped_writing(event: StoppedEvent) -> str:
    """Return words for a failure to write, with the step and the error."""
    step = event.step or 0
    error = visible(event.error)
    return f"the recording ends before step {step}, which could not be written: {error}"


def _troubles(recording: Recording) -> Iterator[Text]:
    end = recording.end
    written = is_written(recording)
    for trouble in lost_ranks(recording):
        yield Text(trouble, "yellow")
    if recording.truncated:
        yield Text("the last step was only partly written, and is left out", "yellow")
    stopped = recording.stopped
    if end is None and stopped is not None:
        yield Text(f"{stopped_writing(stopped)}; the program went on", "yellow")
    elif end is None:
        endings = {
            True: "is running",
            False: "was killed, or could not write any more",
            None: "is running, or was killed",
        }
        said = f"the recording has no end: the program {endings[written]}"
        if len(recording.steps):
            said += f"; the last measured step is {recording.steps[-1]}"
        yield Text(said, "yellow")
    elif end.error:
        yield Text(f"ended with exit status {end.exit}: {end.error}", "bold red")
    elif end.exit:
        yield Text(f"ended with exit status {end.exit}", "bold red")
    for place in last_positions(recording, running=written is True):
        yield Text(place, "yellow")
