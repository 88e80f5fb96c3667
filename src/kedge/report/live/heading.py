"""The head of the live screen: what runs, how it is doing, how far it is, and what watching costs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rich.text import Text

from kedge.numbers import compact, counted, percent, seconds
from kedge.report.live.reading import Glance, Reader, State
from kedge.report.sparkline import NOT_FINITE

STYLES = {
    State.WAITING: "dim",
    State.RUNNING: "bold green",
    State.ENDED: "bold",
    State.FAILED: "bold red",
    State.KILLED: "bold red",
}
DOT = "●"
_MOST_LOSSES, _LOSS_WIDTH = 2, 30


def heading(reader: Reader) -> Text:
    """Give the head of a run, one line or a few."""
    state, glance = reader.state, reader.glance
    if glance is None:
        return Text.assemble((f"{DOT} {state.value}: ", STYLES[state]), (str(reader.path), "bold"))
    lines = [Text.assemble((f"{DOT} {state.value}", STYLES[state]), "  ", (_command(glance), "bold"))]
    lines.append(Text(" · ".join([*_progress(glance), *_cost(glance), *_place(glance)])))
    lines += _losses(glance)
    trouble = _trouble(state, glance)
    return Text("\n").join([*lines, Text(trouble, "red")] if trouble else lines)


def _command(glance: Glance) -> str:
    manifest = glance.recording.manifest
    command = manifest.get("command")
    return shlex.join(command) if command else str(manifest.get("script", "a program without a name"))


def _progress(glance: Glance) -> Iterator[str]:
    recording = glance.recording
    if recording.end is not None:
        yield f"{counted(recording.end.get('steps', 0), 'step')}, {len(recording.steps):,} sampled"
        if recording.end.get("seconds"):
            yield seconds(recording.end["seconds"])
    elif len(recording.steps):
        yield f"step {recording.steps[-1]:,}, {len(recording.steps):,} sampled"
    else:
        yield "no step sampled yet"
    if glance.pace is not None:
        yield f"{compact(glance.pace)} steps/s"


def _cost(glance: Glance) -> Iterator[str]:
    end, budget = glance.recording.end, glance.recording.manifest.get("budget")
    if end is not None and end.get("slowdown") is not None:
        yield f"{percent(end['slowdown'])} of it for watching"
    elif end is not None and end.get("watching") is not None and end.get("seconds"):
        yield f"{percent(end['watching'] / end['seconds'])} of it for watching"
    elif budget is not None:
        yield f"at most {percent(budget)} for watching"


def _losses(glance: Glance) -> Iterator[Text]:
    """Draw the first losses, each with its newest value."""
    for curve in glance.losses[:_MOST_LOSSES]:
        text = Text.assemble(f"loss {compact(curve.values[-1])} ", (curve.drawn(_LOSS_WIDTH), "cyan"))
        text.highlight_regex(f"{NOT_FINITE}+", "bold red")
        yield text.append(f" {curve.label}", "dim")


def _place(glance: Glance) -> Iterator[str]:
    recording = glance.recording
    if recording.manifest.get("device"):
        yield str(recording.manifest["device"])
    if len(recording.ranks) > 1:
        yield counted(len(recording.ranks), "rank")
    yield counted(len(recording.sites), "site")


def _trouble(state: State, glance: Glance) -> str:
    end = glance.recording.end
    if state is State.KILLED:
        return "it has no end and nobody writes it any more: the process was killed"
    if end is not None and end.get("exit"):
        return f"exit status {end['exit']}" + (f": {end['error']}" if end.get("error") else "")
    return ""
