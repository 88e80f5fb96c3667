"""The head of a report: the command, its start, its device, and the cost of watching."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.text import Text

from kedge.errors import BeingWritten, RecordingError
from kedge.short_text import counted, listed, percent, seconds
from kedge.shown_text import typed, visible
from kedge.store.events import EndEvent, StoppedEvent
from kedge.store.recording import Recording
from kedge.store.writing.lock import LOCK, check_written

#: The name of a program that its recording does not name.
UNNAMED = "a program without a name"
_NAMED_RANKS = 8


def command_of(manifest: Mapping[str, Any]) -> str:
    """Return the command of a run, or its script; empty if neither is known."""
    command = manifest.get("command")
    return typed(*command) if command else visible(str(manifest.get("script") or ""))


def is_written(recording: Recording) -> bool | None:
    """Whether a process still writes a recording; None if it has an end, or if that cannot be known."""
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
    for key, words in (("device", "{}"), ("torch", "torch {}"), ("python", "Python {}")):
        if manifest.get(key):
            yield words.format(manifest[key])
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
        yield f"{root.name}: {counted(root.parameters, 'parameter')}"
    yield counted(len(recording.sites), "site")


def _amounts(recording: Recording) -> Iterator[str]:
    end = recording.end
    sampled = len(recording.steps)
    if end is None:
        yield f"{counted(sampled, 'step')} measured so far"
        return
    steps = sampled if end.steps is None else end.steps
    yield f"{counted(steps, 'step')}, {sampled:,} measured"
    if end.seconds:
        cost = ""
        if end.watching is not None:
            cost = f", {percent(end.watching / end.seconds)} of it for watching"
        yield f"{seconds(end.seconds)}{cost}"


def lost_ranks(recording: Recording) -> Iterator[str]:
    """Yield the ranks that recorded nothing, and those whose recording has no end though that of others has one."""
    world, ranks = int(recording.manifest.get("world") or 1), recording.ranks
    if world == 1:
        return
    ended = {recording.rank_of(end) for end in recording.of(EndEvent)}
    absent, cut = sorted(set(range(world)) - set(ranks)), sorted(set(ranks) - ended)
    if ended and absent:
        yield f"{_named(absent)} recorded nothing"
    if ended and cut:
        yield f"{_named(cut)} have no recorded end: killed, or still running"


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed([str(rank) for rank in ranks], _NAMED_RANKS)}"


def stopped_writing(event: StoppedEvent) -> str:
    """Return words for a failure to write: ``the recording ends before step 4: No space left on device``."""
    return f"the recording ends before step {event.step or 0}, which could not be written: {visible(event.error)}"


def _troubles(recording: Recording) -> Iterator[Text]:
    end, sampled = recording.end, recording.steps
    for trouble in lost_ranks(recording):
        yield Text(trouble, "yellow")
    if recording.truncated:
        yield Text("the last step was only partly written, and is left out", "yellow")
    stopped = recording.stopped
    if end is None and stopped is not None:
        yield Text(f"{stopped_writing(stopped)}; the program went on", "yellow")
    elif end is None:
        last = f"; the last measured step is {sampled[-1]}" if len(sampled) else ""
        endings = {
            True: "is running",
            False: "was killed, or could not write any more",
            None: "is running, or was killed",
        }
        what = endings[is_written(recording)]
        yield Text(f"the recording has no end: the program {what}{last}", "yellow")
    elif end.error:
        yield Text(f"ended with exit status {end.exit}: {end.error}", "bold red")
    elif end.exit:
        yield Text(f"ended with exit status {end.exit}", "bold red")
