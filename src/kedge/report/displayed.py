"""`kedge.Recording`, which is displayed with its verdict: as a few lines, or in a notebook as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic

from kedge import notebook
from kedge.report.program_line import line_of_finding
from kedge.report.verdict import headline
from kedge.report.what_ran import UNNAMED, amounts, command_of
from kedge.rules.judgement import Judgement, judge
from kedge.rules.recorded.once import once
from kedge.rules.rule import Finding
from kedge.short_text import counted
from kedge.shown_text import typed
from kedge.store.recording import Display, Recording

__all__ = ["Recording"]

#: The most seconds that rules run for a recording to be displayed.
LONGEST = 2.0
#: The findings that are shown as text, and the characters of each line.
MOST, WIDTH = 3, 100


def text_of(recording: Recording) -> str:
    """Return what ran, the verdict, the first findings, and what to call next."""
    judgement = judged(recording)
    lines = [_title(recording), _steps(recording), _verdict(judgement)]
    for finding in judgement.findings[:MOST]:
        head = f"{finding.severity} {finding.code} at {_place(finding)}"
        lines.append(_cut(f"{head}: {finding.message}"))
        culprit = finding.evidence.culprit()
        if culprit is not None:
            lines.append(_cut(f"    {culprit}  {culprit.text or ''}".rstrip()))
    left = len(judgement.findings) - MOST
    if left > 0:
        lines.append(f"... and {left:,} more")
    return "\n".join([*lines, *_next(recording)])


def html_of(recording: Recording) -> str:
    """Return the same as HTML: the findings are a table."""
    judgement = judged(recording)
    parts = [notebook.heading(_title(recording))]
    parts.append(notebook.paragraph(_steps(recording)))
    parts.append(notebook.paragraph(_verdict(judgement), quiet=False))
    rows = []
    for finding in judgement.findings:
        line = line_of_finding(recording, finding)
        place = ""
        if line is not None:
            place = ": ".join(filter(None, (line.place, line.source.text)))
        rows.append((finding.severity, finding.code, _place(finding), place, finding.message))
    if rows:
        columns = ("", "rule", "where", "line of the program", "finding")
        parts.append(notebook.table(columns, rows, align="lmlll"))
    parts += [notebook.paragraph(line) for line in _next(recording)]
    return "".join(parts)


@once
def judged(recording: Recording) -> Judgement:
    """Return the judgement of all rules for which there was time."""
    return judge(recording, is_over=_after(LONGEST))


def _after(duration: float) -> Callable[[], bool]:
    """Return a function that tells whether some seconds have passed."""
    end = monotonic() + duration
    return lambda: monotonic() > end


def _title(recording: Recording) -> str:
    command = command_of(recording.manifest) or UNNAMED
    if recording.path.name:
        return f"{recording.path.name}: {command}"
    return command


def _steps(recording: Recording) -> str:
    return " · ".join([*amounts(recording), counted(len(recording.sites), "site")])


def _cut(line: str) -> str:
    if len(line) <= WIDTH:
        return line
    return f"{line[: WIDTH - 1].rstrip()}…"


def _verdict(judgement: Judgement) -> str:
    said = headline(judgement)
    if not judgement.findings and not judgement.measured:
        said = "nothing was judged: no step was measured"
    if judgement.left:
        said += f"; {counted(judgement.left, 'rule')} left out, as they would have taken longer"
    elif judgement.unjudged:
        said += f"; {counted(len(judgement.unjudged), 'rule')} could not judge"
    return said


def _place(finding: Finding) -> str:
    if finding.step < 0:
        return finding.site
    return f"{finding.site}, step {finding.step:,}"


def _next(recording: Recording) -> Iterator[str]:
    """Yield what to type for more: for all findings, and for the numbers."""
    findings = "kedge.rules.check(recording)"
    if recording.path.name:
        findings += f", or in a shell: kedge report {typed(str(recording.path))}"
    yield f"all findings: {findings}"
    calls = [".sites", ".steps", ".events"]
    loss = next(iter(recording.of_kind("loss")), None)
    if loss is not None:
        calls.append(f'.rows("{loss.site}")')
    first = next(iter(recording.of_kind("out")), None)
    if first is not None:
        calls.append(f'.series("{first.site}", "rms")')
    yield f"its numbers: {', '.join(calls)}"


Recording.display = Display(text_of, html_of)
