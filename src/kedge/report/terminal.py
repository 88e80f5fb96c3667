"""A recording and its findings, drawn in a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.text import Text

from kedge.report.apart import apart_blocks, sentence
from kedge.report.curves import curves_of, early_end
from kedge.report.findings import MARKS, STYLES, render_findings
from kedge.report.fitted_text import cut, print_paragraph
from kedge.report.head import head
from kedge.report.module_lines import FoldedLine, ModuleLine, folded, lines, matching
from kedge.report.module_table import BAD, columns, drawn, header
from kedge.report.sparkline import NOT_FINITE
from kedge.report.verdict import advice, left_open, tally, verdict
from kedge.rules.judgement import Judgement, judgement_of
from kedge.rules.rule import SEVERITIES, Finding, Rule
from kedge.short_text import compact, counted
from kedge.store.recording import Recording

PLAIN_WIDTH = 100
NARROWEST, WIDEST = 80, 200
_MOST_CURVES, _CURVE_WIDTH = 6, 25
_FOLDED = (
    ": all modules with these numbers; 1.2..3.4 is the smallest and the largest figure among them, and the trend is their "
    "median. A block that has a finding, or is far from the others, has a line of its own."
)


@dataclass(frozen=True)
class ReportExtent:
    """The part of a recording that a report shows.

    Attributes:
        sites: Patterns over module paths; all modules if None.
        most: The most lines; no limit if None. Modules with findings are always shown.
        folds: Whether alike blocks share a line if there are many.
    """

    sites: str | None = None
    most: int | None = 40
    folds: bool = True


class OutputConsole(Console):
    """A console that leaves it to the command what a closed pipe means: rich would end it with the status of a finding."""

    def on_broken_pipe(self) -> None:
        """Raise the error again."""
        raise BrokenPipeError


def console_for(stream: TextIO | None = None) -> Console:
    """Return a console as wide as the terminal; without a terminal, a plain one of 100 columns.

    ``NO_COLOR`` turns colours off, and so does ``CI`` without ``FORCE_COLOR``; ``COLUMNS`` sets
    another width.
    """
    stream = stream or sys.stdout
    plain = (
        True if os.environ.get("CI") and not os.environ.get("FORCE_COLOR") else None
    )  # None: as NO_COLOR says
    console = OutputConsole(file=stream, highlight=False, soft_wrap=False, no_color=plain)
    width = console.width if console.is_terminal or os.environ.get("COLUMNS") else PLAIN_WIDTH
    console.width = min(max(width, NARROWEST), WIDEST)
    return console


def render(
    recording: Recording,
    findings: Sequence[Finding],
    console: Console,
    extent: ReportExtent | None = None,
    rules: Sequence[Rule] | None = None,
) -> None:
    """Print a report: the run, the findings, and a table of the modules in data-flow order.

    Args:
        recording: The recording.
        findings: The findings of the rules, the worst first.
        console: The console to print to.
        extent: The part of the recording to show.
        rules: The rules that were run; all of them if None.

    Raises:
        NoSuchSite: No module matches ``extent.sites``.
    """
    extent = extent or ReportExtent()
    known = lines(recording)
    chosen = matching(known, extent.sites) if extent.sites is not None else known
    for text in head(recording):
        print_paragraph(text, console)
    console.print()
    _render_verdict(judgement_of(recording, findings, rules), console, extent)
    if extent.sites is None:
        _render_curves(recording, console)
    if not chosen or not len(recording.steps):
        console.print(_nothing(recording))
        return
    made = folded(chosen, findings) if extent.folds else list(chosen)
    titles = _render_table(made, len(chosen), marks_of(made, findings), console, extent.most)
    console.print()
    print_paragraph(_legend(recording, made, titles), console)


def _render_verdict(judgement: Judgement, console: Console, extent: ReportExtent) -> None:
    findings = judgement.findings
    worst = next(
        (severity for severity in SEVERITIES if any(f.severity == severity for f in findings)), None
    )
    if worst is None and not judgement.measured:
        return
    style = STYLES[worst] if worst is not None else "green" if judgement.complete else ""
    print_paragraph(Text(tally(findings) if findings else verdict(judgement), style), console)
    console.print()
    if findings:
        render_findings(findings, console, *([None] if extent.most is None else []))
    if judgement.complete:
        return
    for line in left_open(judgement) if findings else ():
        print_paragraph(Text(line), console)
    for line in advice(judgement):  # a command stays on one line, so that it can be copied
        console.print(Text(line), soft_wrap=True)
    console.print()


def _render_curves(recording: Recording, console: Console) -> None:
    """Print the losses and the norms of gradients, each with its first and last value."""
    found = [curve for curve in curves_of(recording) if len(curve.steps)]
    for curve in found[:_MOST_CURVES]:
        ends = f"{compact(curve.values[0]):>7} → {compact(curve.values[-1]):<7}"
        text = Text(f"  {curve.title:13} {ends} ").append(curve.drawn(_CURVE_WIDTH), "cyan")
        text.highlight_regex(f"{NOT_FINITE}+", BAD)
        text.append(f"  {cut(curve.label, console.width - text.cell_len - 2)}", "dim")
        console.print(text)
    if len(found) > _MOST_CURVES:
        console.print(
            Text(
                f"  … {counted(len(found) - _MOST_CURVES, 'curve')} more on the page (--html)",
                "dim",
            )
        )
    if found:
        early = early_end(recording, found)
        if early:
            console.print(Text(f"  {early}", "dim"))
        console.print()


def _nothing(recording: Recording) -> Text:
    if not recording.sites:
        return Text("nothing was recorded: the program called no module while it was watched")
    if not len(recording.steps):
        return Text("nothing was measured: the program finished no step while it was watched")
    return Text("there is no table: no output, gradient or parameter of a module was watched")


def _render_table(
    made: Sequence[ModuleLine],
    modules: int,
    marks: dict[str, Text],
    console: Console,
    most: int | None,
) -> set[str]:
    """Print the table, and return the titles of the columns for which there was room."""
    shown = _chosen_lines(made, marks, most)
    steps = len(made[0].recording.steps)
    layout = columns([made[i] for i in shown], steps, console.width, marks)
    console.print(header(layout))
    for left_out, index in _with_gaps(shown, len(made)):
        if left_out:
            console.print(
                Text(
                    f"  … {counted(left_out, 'line' if len(made) < modules else 'module')} left out",
                    "dim",
                )
            )
        if index is not None:
            console.print(drawn(made[index], layout))
    for amount in _amounts(made, shown, modules):
        console.print()
        print_paragraph(
            Text(f"{amount}; --all shows every module, --sites SELECTOR the ones you choose"),
            console,
        )
    apart = sentence(apart_blocks(made))
    if apart:
        print_paragraph(Text(apart), console)
    return {column.title for column in layout}


def _amounts(made: Sequence[ModuleLine], shown: Sequence[int], modules: int) -> Iterator[str]:
    """Yield the numbers of modules and of lines, if some modules have no line of their own."""
    if len(made) < modules:
        amount = f"{counted(modules, 'module')} in {counted(len(made), 'line')}, with similar blocks in one"
        yield amount + (
            f"; {len(shown):,} of the lines are shown" if len(shown) < len(made) else ""
        )
    elif len(shown) < len(made):
        yield f"{len(shown):,} of {counted(len(made), 'module')} shown"


def marks_of(chosen: Sequence[ModuleLine], findings: Sequence[Finding]) -> dict[str, Text]:
    """Return the marks of lines with findings, by label: each of its worst severity."""
    severities = {finding.site: finding.severity for finding in reversed(findings)}
    marks = {}
    for line in chosen:
        own = {severities[text] for text in line.texts if text in severities}
        worst = next((severity for severity in SEVERITIES if severity in own), None)
        if worst is not None:
            marks[line.label] = Text(MARKS[worst], STYLES[worst])
    return marks


def _chosen_lines(
    chosen: Sequence[ModuleLine], marks: dict[str, Text], most: int | None
) -> list[int]:
    """Return the indices of the lines to show: those with a finding, and the first of the others."""
    if most is None or len(chosen) <= most:
        return list(range(len(chosen)))
    marked = [i for i, line in enumerate(chosen) if line.label in marks]
    others = [i for i, line in enumerate(chosen) if line.label not in marks]
    return sorted(marked + others[: max(most - len(marked), 0)])


def _with_gaps(shown: Sequence[int], total: int) -> Iterator[tuple[int, int | None]]:
    """Yield each shown index after the number of those left out before it, and None at the end."""
    after = 0
    for index in shown:
        yield index - after, index
        after = index + 1
    yield total - after, None


def _legend(recording: Recording, made: Sequence[ModuleLine], titles: set[str]) -> Text:
    first, last = int(recording.steps[0]), int(recording.steps[-1])
    since = any(series.since for line in made for series in (line.out, line.gradient) if series)
    folds = next((f" {line.label}{_FOLDED}" for line in made if isinstance(line, FoldedLine)), "")
    narrow = [
        name
        for name in ("update", "zero")
        if name not in titles and any(line.newest(name) for line in made)
    ]
    wider = f" A wider terminal shows {' and '.join(narrow)}." if narrow else ""
    return Text(
        f"out, grad: root mean square of a module's output and of its gradient, at step {last}, the last measured one"
        f"{'; nan, inf: non-finite in a later step' if since else ''}. "
        f"trend: steps {first} to {last}, each line on its own logarithmic scale; "
        "✗ non-finite values, 0 only zeros. "
        "update: change of the parameters in one step, relative to their size. zero: share of exact zeros."
        f"{wider}{folds}",
        "dim",
    )
