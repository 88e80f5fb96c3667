"""The last lines of a run for its user.

# Note [Rich and the program's random numbers]
On import, Rich draws a number from Python's generator. Where the program itself imports Rich after
it has seeded that, it has to draw the same number as without Kedge. So `kedge run` imports this
module, and Rich with it, when the program has ended.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from kedge import native
from kedge.errors import RecordingError
from kedge.native import on_device
from kedge.program.ending import ended_before
from kedge.report.apart import apart_in_short
from kedge.report.head import lost_ranks
from kedge.report.positions import last_positions
from kedge.report.program_line import ProgramLine
from kedge.report.tensors.content import first_broken, is_of_tensors, told_program
from kedge.report.verdict import advice, not_watched, tally, verdict
from kedge.repro.kept.kept_pass import kept_in, place_of
from kedge.rules.judgement import Judgement, judge
from kedge.rules.project_config import configured_rules
from kedge.short_text import counted, listed, percent, seconds, shortened
from kedge.shown_text import typed, visible
from kedge.stderr import Shield
from kedge.store.reading.json_files import read_manifest, read_ranks
from kedge.store.recording import Recording
from kedge.watch.run.end_clock import EndClock
from kedge.watch.run.recorder import RecordingSink
from kedge.watch.totals import WatchSummary

NO_MODULE = (
    "the program called no module in this process, except in functions that are compiled as a "
    "whole, and made no operation with tensors that can be seen"
)
LEFT_ALONE = (
    "the program called no module in this process, and its operations were not looked at, which "
    "would have changed what it does: traces of torch.jit, PyTorch's profiler, swap_tensors and "
    "operators with mutates_args do not work under a mode, and it has one at "
)
NO_SITE = (
    "modules were called, but no selected site had a value that can be measured; list the "
    "sites with kedge sites"
)
CHECKING = "checking the recording", "its findings are unknown"
#: Most rules that the last lines name.
NAMED_RULES = 3
#: Most letters of a line of the program.
LONGEST_LINE = 200


def last_words(
    name: str,
    recorder: RecordingSink,
    summary: WatchSummary,
    folder: Path | None = None,
    error: BaseException | None = None,
    end: EndClock | None = None,
) -> Iterator[str]:
    """Yield the last lines for the user: the figures of the run, the findings, and the next command.

    Args:
        name: The recording, as the user named it.
        recorder: The sink that wrote it.
        summary: The figures of the watch.
        folder: Where the search for the project's configuration begins; the working directory if
            None.
        error: The error that ended the program; None if it ran to its last line.
        end: The clock of the work after the program; one that begins now if None.
    """
    if recorder.writer is not None:
        yield from words_on(
            name, recorder.place, summary, folder, end, is_whole=not recorder.failed
        )
    elif recorder.failed or summary.failed:
        yield "nothing was recorded"
    elif summary.steps:
        yield f"nothing was recorded: {NO_SITE}"
    else:
        why = NO_MODULE
        if summary.left_alone:
            why = LEFT_ALONE + visible(shortened(summary.left_alone, LONGEST_LINE))
        why = ended_before("it called a module", error) or why
        yield f"nothing was recorded: {why}"


def words_on(
    name: str,
    place: Path,
    summary: WatchSummary,
    folder: Path | None = None,
    end: EndClock | None = None,
    *,
    is_whole: bool = True,
) -> Iterator[str]:
    """Yield the lines about a recording that was made.

    Arguments as in `last_words`, and whether all of it was written.
    """
    if end is None:
        end = EndClock(summary.watching, summary.seconds)
    checked = _checked(name, place, folder, end)
    written = f"{summary.sampled:,} measured"
    if not is_whole:
        written += _on_disk(place)

    took, passed = end.cost()  # after the work that it counts
    cost = percent(took / passed) if passed else "nothing"
    sites = counted(summary.sites, "site")
    steps = counted(summary.steps, "step")
    yield (
        f"{_rank_prefix(place)}{sites}, {steps}, {written}; "
        f"watching took {cost} of {seconds(passed)}"
    )
    yield from checked
    if not native.available():
        yield f"watching would cost less with Kedge's compiled part: {native.why_not()}"
    for kind, why in on_device.why_not().items():
        yield f"watching would cost less on {kind} with Triton: {why}"
    kept = kept_in(place)
    if kept:
        numbers = sorted({place_of(folder)[0] for folder in kept})
        steps = "step" if len(numbers) == 1 else "steps"
        named = listed([str(number) for number in numbers], 4)
        yield f"kept {steps} {named}; run one again with: {typed('kedge', 'replay', name)}"
    yield f"see more with: {typed('kedge', 'report', name)}"


def _on_disk(place: Path) -> str:
    """Return words for what was written before writing failed."""
    try:
        steps = Recording.open(place).steps
    except RecordingError:  # `_checked` reports what is wrong with it
        return ", and not all written"
    if not len(steps):
        return ", none of them on the disk: they could not be written"
    until = f"up to step {steps[-1]}"
    return f", {len(steps):,} of them on the disk ({until}), the rest could not be written"


def _rank_prefix(place: Path) -> str:
    """Return a prefix that marks figures as rank 0's and counts the ranks that recorded.

    Empty for a single process.
    """
    try:
        world = int(read_manifest(place).get("world") or 1)
        ranks = read_ranks(place)
    except RecordingError:  # `_checked` reports what is wrong with it
        return ""
    if world == 1:
        return ""
    shown = counted(world, "rank")
    if len(ranks) != world:
        shown = f"{len(ranks):,} of {shown}"
    return f"{shown} recorded; rank 0: "


def _checked(name: str, place: Path, folder: Path | None, end: EndClock) -> list[str]:
    failures: list[str] = []
    lines = Shield(*CHECKING, tell=failures.append)(_judged, name, place, folder, end)
    if lines is None:
        return failures[:1]
    return lines


def _judged(name: str, place: Path, folder: Path | None, end: EndClock) -> list[str]:
    recording = Recording.open(place)
    judgement = judge(recording, configured_rules(folder=folder), end.is_over)
    lines = [*lost_ranks(recording), *_of_tensors(recording)]
    if len(recording.ranks) > 1:  # the error of a single process has just been printed
        lines += last_positions(recording)
    lines.append(in_short(judgement))
    lines += _line_at_fault(judgement)
    if judgement.left:
        ran = f"{judgement.rules} of {counted(judgement.rules + judgement.left, 'rule')}"
        lines.append(
            f"judged {ran}, as the rest would take longer than {seconds(end.limit)}; "
            f"it does: kedge check {shlex.quote(name)}"
        )
    elif not end.is_over():
        apart = apart_in_short(recording, judgement.findings)
        if apart:
            lines.append(apart)
    return lines


def _of_tensors(recording: Recording) -> Iterator[str]:
    """Yield what was seen of a program of tensors, and its first value that is not finite."""
    if not is_of_tensors(recording):
        return
    for line in (told_program(recording), first_broken(recording)):
        if line:
            yield line


def _line_at_fault(judgement: Judgement) -> Iterator[str]:
    """Yield the line of the program that has the fault of the first finding, if it is known."""
    if not judgement.findings or judgement.findings[0].severity == "info":
        return
    source = judgement.findings[0].evidence.culprit()
    if source is not None and source.text:
        text = shortened(source.text, LONGEST_LINE)
        yield visible(f"{ProgramLine(source).place}: {text}")


def in_short(judgement: Judgement) -> str:
    """Return the findings in short: ``1 error: NAN-BORN at log:out and 2 more``.

    The line counts them, and names the first rules and those that could not judge.
    """
    findings = judgement.findings
    if not findings:
        return "; ".join([verdict(judgement, NAMED_RULES), *advice(judgement)])
    places: dict[str, list[str]] = {}
    for finding in findings:
        places.setdefault(finding.code, []).append(finding.site)
    named = [_named(code, sites) for code, sites in list(places.items())[:NAMED_RULES]]
    parts = [f"{tally(findings)}: {'; '.join(named)}"]
    if judgement.unseen:
        parts.append(not_watched(judgement, NAMED_RULES))
    if judgement.unjudged:
        parts.append(f"{counted(len(judgement.unjudged), 'rule')} could not judge")
    return "; ".join(parts)


def _named(code: str, sites: Sequence[str]) -> str:
    first, *more = sites
    if more:
        return f"{code} at {first} and {len(more)} more"
    return f"{code} at {first}"
