"""What ran and how it ended, and its circumstances: the start, the device, the cost of watching."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from rich.text import Text

from kedge.report.positions import last_positions, ranks_named
from kedge.report.what_ran import UNNAMED, amounts, command_of, is_written
from kedge.rules.recorded.roots import root_titles
from kedge.short_text import counted
from kedge.shown_text import visible
from kedge.store.events import EndEvent, StoppedEvent
from kedge.store.recording import Recording


def head(recording: Recording) -> Iterator[Text]:
    """Yield the first lines of a report: what ran, and how it ended unless that is ordinary."""
    yield Text(command_of(recording.manifest) or UNNAMED, "bold")
    yield from _troubles(recording)


def circumstances(recording: Recording) -> Iterator[Text]:
    """Yield the lines about the machine, what was watched, and the steps."""
    for parts in (_machine(recording.manifest), _watched(recording), amounts(recording)):
        line = " · ".join(parts)
        if line:
            yield Text(line)


def _machine(manifest: Mapping[str, Any]) -> Iterator[str]:
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
    for root, title in zip(recording.roots, root_titles(recording), strict=True):
        yield f"{visible(title)}: {counted(root.parameters, 'parameter')}"
    yield counted(len(recording.sites), "site")


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
