"""The head of the live screen: the command, the state and progress of a run, and its cost."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from kedge.report.head import stopped_writing
from kedge.report.live.reading import RunReader, RunState
from kedge.report.positions import last_positions
from kedge.report.shown_run import ShownRun
from kedge.report.what_ran import UNNAMED
from kedge.short_text import compact, counted, percent, seconds
from kedge.store.recording import Recording

STYLES = {
    RunState.WAITING: "dim",
    RunState.RUNNING: "bold green",
    RunState.ENDED: "bold",
    RunState.FAILED: "bold red",
    RunState.KILLED: "bold red",
    RunState.UNCLEAR: "bold yellow",
}
DOT = "●"
_MOST_LOSSES = 2
_MOST_LOGGED = 3
_LOSS_WIDTH = 30


def heading(reader: RunReader) -> Text:
    """Return the head of a run, one line or a few."""
    state = reader.state
    shown_run = reader.shown_run
    mark = f"{DOT} {state.value}"
    if shown_run is None:
        return Text.assemble((f"{mark}: ", STYLES[state]), (str(reader.path), "bold"))

    command = (shown_run.command or UNNAMED, "bold")
    said = [*_progress(shown_run), *_cost(shown_run.recording), *_place(shown_run)]
    lines = [
        Text.assemble((mark, STYLES[state]), "  ", command),
        Text(" · ".join(said)),
    ]
    for curve in shown_run.losses[:_MOST_LOSSES]:
        text = Text(f"loss {compact(curve.values[-1])} ").append_text(curve.drawn(_LOSS_WIDTH))
        lines.append(text.append(f" {curve.label}", "dim"))
    for curve in shown_run.logged[:_MOST_LOGGED]:
        text = Text(f"{curve.title} {compact(curve.values[-1])} ")
        lines.append(text.append_text(curve.drawn(_LOSS_WIDTH)))
    trouble = _trouble(state, shown_run.recording)
    if trouble:
        lines.append(Text(trouble, "red"))
    running = state is RunState.RUNNING
    places = last_positions(shown_run.recording, running=running)
    lines += [Text(place, "red") for place in places]
    return Text("\n").join(lines)


def _progress(shown_run: ShownRun) -> Iterator[str]:
    recording = shown_run.recording
    if recording.end is not None:
        yield f"{counted(recording.end.steps or 0, 'step')}, {len(recording.steps):,} measured"
        if recording.end.seconds:
            yield seconds(recording.end.seconds)
    elif len(recording.steps):
        yield f"step {recording.steps[-1]:,}, {len(recording.steps):,} measured"
    elif shown_run.is_over:
        yield "no step measured"
    else:
        yield "no step measured yet"
    if shown_run.pace is not None:
        yield f"{compact(shown_run.pace)} steps/s"


def _cost(recording: Recording) -> Iterator[str]:
    end = recording.end
    budget = recording.manifest.get("budget")
    if end is not None and end.slowdown is not None:
        yield f"{percent(end.slowdown)} of it for watching"
    elif end is not None and end.watching is not None and end.seconds:
        yield f"{percent(end.watching / end.seconds)} of it for watching"
    elif budget is not None:
        yield f"at most {percent(budget)} for watching"


def _place(shown_run: ShownRun) -> Iterator[str]:
    recording = shown_run.recording
    if recording.manifest.get("device"):
        yield str(recording.manifest["device"])
    if len(recording.ranks) > 1:
        yield counted(len(recording.ranks), "rank")
    yield counted(len(recording.sites), "site")


def _trouble(state: RunState, recording: Recording) -> str:
    end = recording.end
    if state is RunState.KILLED and recording.stopped is not None:
        return stopped_writing(recording.stopped)
    if state is RunState.KILLED:
        return (
            "the recording has no end, and no process is writing to it: "
            "the program was killed, or could not write any more"
        )
    if end is None or not end.exit:
        return ""
    if end.error:
        return f"exit status {end.exit}: {end.error}"
    return f"exit status {end.exit}"
