"""The head of the live screen: the command, the state and progress of the run, and the cost of watching."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from kedge.report.head import UNNAMED, command_of, stopped_writing
from kedge.report.live.reading import RunReader, RunSnapshot, RunState
from kedge.report.sparkline import NOT_FINITE
from kedge.short_text import compact, counted, percent, seconds

STYLES = {
    RunState.WAITING: "dim",
    RunState.RUNNING: "bold green",
    RunState.ENDED: "bold",
    RunState.FAILED: "bold red",
    RunState.KILLED: "bold red",
    RunState.UNCLEAR: "bold yellow",
}
DOT = "●"
_MOST_LOSSES, _LOSS_WIDTH = 2, 30


def heading(reader: RunReader) -> Text:
    """Return the head of a run, one line or a few."""
    state, snapshot = reader.state, reader.snapshot
    if snapshot is None:
        return Text.assemble((f"{DOT} {state.value}: ", STYLES[state]), (str(reader.path), "bold"))
    lines = [
        Text.assemble(
            (f"{DOT} {state.value}", STYLES[state]),
            "  ",
            (command_of(snapshot.recording.manifest) or UNNAMED, "bold"),
        )
    ]
    lines.append(Text(" · ".join([*_progress(snapshot), *_cost(snapshot), *_place(snapshot)])))
    lines += _losses(snapshot)
    trouble = _trouble(state, snapshot)
    return Text("\n").join([*lines, Text(trouble, "red")] if trouble else lines)


def _progress(snapshot: RunSnapshot) -> Iterator[str]:
    recording = snapshot.recording
    if recording.end is not None:
        yield f"{counted(recording.end.get('steps', 0), 'step')}, {len(recording.steps):,} measured"
        if recording.end.get("seconds"):
            yield seconds(recording.end["seconds"])
    elif len(recording.steps):
        yield f"step {recording.steps[-1]:,}, {len(recording.steps):,} measured"
    else:
        yield "no step measured yet"
    if snapshot.pace is not None:
        yield f"{compact(snapshot.pace)} steps/s"


def _cost(snapshot: RunSnapshot) -> Iterator[str]:
    end, budget = snapshot.recording.end, snapshot.recording.manifest.get("budget")
    if end is not None and end.get("slowdown") is not None:
        yield f"{percent(end['slowdown'])} of it for watching"
    elif end is not None and end.get("watching") is not None and end.get("seconds"):
        yield f"{percent(end['watching'] / end['seconds'])} of it for watching"
    elif budget is not None:
        yield f"at most {percent(budget)} for watching"


def _losses(snapshot: RunSnapshot) -> Iterator[Text]:
    """Yield the first losses, each with its newest value."""
    for curve in snapshot.losses[:_MOST_LOSSES]:
        text = Text.assemble(
            f"loss {compact(curve.values[-1])} ", (curve.drawn(_LOSS_WIDTH), "cyan")
        )
        text.highlight_regex(f"{NOT_FINITE}+", "bold red")
        yield text.append(f" {curve.label}", "dim")


def _place(snapshot: RunSnapshot) -> Iterator[str]:
    recording = snapshot.recording
    if recording.manifest.get("device"):
        yield str(recording.manifest["device"])
    if len(recording.ranks) > 1:
        yield counted(len(recording.ranks), "rank")
    yield counted(len(recording.sites), "site")


def _trouble(state: RunState, snapshot: RunSnapshot) -> str:
    end = snapshot.recording.end
    if state is RunState.KILLED and (stopped := snapshot.recording.stopped) is not None:
        return stopped_writing(stopped)
    if state is RunState.KILLED:
        return "the recording has no end, and no process is writing to it: the program was killed, or could not write any more"
    if end is not None and end.get("exit"):
        return f"exit status {end['exit']}" + (f": {end['error']}" if end.get("error") else "")
    return ""
