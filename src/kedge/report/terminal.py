"""A recording and its findings, drawn in a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.text import Text

from kedge.report.apart import apart_blocks, sentence
from kedge.report.findings import SHOWN_PER_RULE, STYLES, render_findings
from kedge.report.fitted_text import cut, print_paragraph
from kedge.report.head import circumstances, head
from kedge.report.module_lines import FoldedLine, ModuleLine, folded, matching
from kedge.report.module_table import columns
from kedge.report.shown_run import ShownRun
from kedge.report.table import drawn, header
from kedge.report.tensors.content import is_of_tensors
from kedge.report.tensors.terminal import render_tensors
from kedge.report.verdict import advice, left_open, tally, verdict
from kedge.short_text import compact, counted

PLAIN_WIDTH = 100
NARROWEST, WIDEST = 80, 200
_MOST_CURVES = 6
_CURVE_WIDTH = 25
_FOLDED = (
    ": all modules with these numbers; 1.2..3.4 is the smallest and the largest figure "
    "among them, and the trend is their median. A block that has a finding, or is far from "
    "the others, has a line of its own."
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
    """A console that leaves it to the command what a closed pipe means.

    Rich would end it with the status of a finding.
    """

    def on_broken_pipe(self) -> None:
        """Raise the error again."""
        raise BrokenPipeError


def console_for(stream: TextIO | None = None) -> Console:
    """Return a console as wide as the terminal; without a terminal, a plain one of 100 columns.

    ``NO_COLOR`` turns colours off, and so does ``CI`` without ``FORCE_COLOR``; ``COLUMNS`` sets
    another width.
    """
    stream = stream or sys.stdout
    plain = None  # as NO_COLOR says
    if os.environ.get("CI") and not os.environ.get("FORCE_COLOR"):
        plain = True
    console = OutputConsole(file=stream, highlight=False, soft_wrap=False, no_color=plain)
    width = PLAIN_WIDTH
    if console.is_terminal or os.environ.get("COLUMNS"):
        width = console.width
    console.width = min(max(width, NARROWEST), WIDEST)
    return console


def render(
    shown_run: ShownRun,
    console: Console,
    extent: ReportExtent | None = None,
) -> None:
    """Print a report: the verdict, then the run, its curves, and its modules in data-flow order.

    Args:
        shown_run: The recording with its findings.
        console: The console to print to.
        extent: The part of the recording to show.

    Raises:
        NoSuchSite: No module matches ``extent.sites``.
    """
    extent = extent or ReportExtent()
    recording = shown_run.recording
    chosen = shown_run.lines
    if extent.sites is not None:
        chosen = matching(shown_run.lines, extent.sites)

    for text in head(recording):
        print_paragraph(text, console)
    _render_verdict(shown_run, console, extent)
    for text in circumstances(recording):
        print_paragraph(text, console)
    console.print()
    if extent.sites is None:
        _render_curves(shown_run, console)
    if is_of_tensors(recording) and extent.sites is None:
        render_tensors(recording, console, whole=extent.most is None)
    if is_of_tensors(recording) and not chosen:
        return
    if not recording.sites:
        console.print("nothing was recorded: the program called no module while it was watched")
    elif not len(recording.steps):
        console.print("nothing was measured: the program finished no step while it was watched")
    elif not chosen:
        console.print("there is no table: no output, gradient or parameter of a module was watched")
    else:
        made = list(chosen)
        if extent.folds:
            made = folded(chosen, shown_run.findings)
        _render_table(shown_run, made, len(chosen), console, extent.most)


def _render_verdict(
    shown_run: ShownRun,
    console: Console,
    extent: ReportExtent,
) -> None:
    judgement = shown_run.judgement
    findings = judgement.findings
    if not findings and not judgement.measured:
        console.print()
        return
    if findings:
        print_paragraph(Text(tally(findings), STYLES[findings[0].severity]), console)
        console.print()
        limit = None if extent.most is None else SHOWN_PER_RULE
        render_findings(shown_run.recording, findings, console, limit)
    else:
        style = "green" if judgement.complete else ""
        print_paragraph(Text(verdict(judgement), style), console)
        console.print()
    if judgement.complete:
        return
    if findings:
        for line in left_open(judgement):
            print_paragraph(Text(line), console)
    for line in advice(judgement):  # a command stays on one line, so that it can be copied
        console.print(Text(line), soft_wrap=True)
    console.print()


def _render_curves(shown_run: ShownRun, console: Console) -> None:
    """Print the curves, each with its first and last value: those of the watch, then what was logged."""
    found = shown_run.drawn_curves
    own = [curve for curve in found if curve.kind != "logged"][:_MOST_CURVES]
    drawn = [*own, *shown_run.logged[:_MOST_CURVES]]
    for curve in drawn:
        ends = f"{compact(curve.values[0]):>7} → {compact(curve.values[-1]):<7}"
        text = Text(f"  {cut(curve.title, 13):13} {ends} ").append_text(curve.drawn(_CURVE_WIDTH))
        text.append(f"  {cut(curve.name, console.width - text.cell_len - 2)}", "dim")
        console.print(text)
    if len(found) > len(drawn):
        more = counted(len(found) - len(drawn), "curve")
        console.print(Text(f"  … {more} more on the page (--html)", "dim"))
    if found:
        if shown_run.early:
            console.print(Text(f"  {shown_run.early}", "dim"))
        console.print()


def _render_table(
    shown_run: ShownRun,
    made: Sequence[ModuleLine],
    modules: int,
    console: Console,
    most: int | None,
) -> None:
    """Print the table, what it leaves out, and what its columns mean."""
    marks = shown_run.marks(made)
    shown = _chosen_lines(made, marks, most)
    steps = len(shown_run.recording.steps)
    layout = columns([made[i] for i in shown], steps, console.width, marks)
    is_folded = len(made) < modules
    unit = "line" if is_folded else "module"

    console.print(header(layout))
    after = 0
    for index in [*shown, len(made)]:
        if index > after:
            left_out = counted(index - after, unit)
            console.print(Text(f"  … {left_out} left out", "dim"))
        if index < len(made):
            console.print(drawn(made[index], layout))
        after = index + 1

    amount = ""
    if is_folded:
        amount = f"{counted(modules, 'module')} in {counted(len(made), 'line')}"
        amount += ", with similar blocks in one"
        if len(shown) < len(made):
            amount += f"; {len(shown):,} of the lines are shown"
    elif len(shown) < len(made):
        amount = f"{len(shown):,} of {counted(len(made), 'module')} shown"
    if amount:
        console.print()
        text = f"{amount}; --all shows every module, --sites SELECTOR the ones you choose"
        print_paragraph(Text(text), console)
    apart = sentence(apart_blocks(made))
    if apart:
        print_paragraph(Text(apart), console)
    console.print()
    print_paragraph(_legend(shown_run, made, {column.title for column in layout}), console)


def _chosen_lines(
    made: Sequence[ModuleLine], marks: Mapping[str, Text], most: int | None
) -> list[int]:
    """Return the indices of the lines to show: those with a finding, and the first of the others."""
    if most is None or len(made) <= most:
        return list(range(len(made)))
    marked = [i for i, line in enumerate(made) if line.label in marks]
    others = [i for i, line in enumerate(made) if line.label not in marks]
    return sorted(marked + others[: max(most - len(marked), 0)])


def _legend(shown_run: ShownRun, made: Sequence[ModuleLine], titles: set[str]) -> Text:
    steps = shown_run.recording.steps
    since = ""
    for line in made:
        if (line.out and line.out.since) or (line.gradient and line.gradient.since):
            since = "; nan, inf: non-finite in a later step"
    said = (
        "out, grad: root mean square of a module's output and of its gradient, "
        f"at step {steps[-1]}, the last measured one{since}. "
        f"trend: steps {steps[0]} to {steps[-1]}, each line on its own logarithmic scale; "
        "✗ non-finite values, 0 only zeros. "
        "update: change of the parameters in one step, relative to their size. "
        "zero: share of exact zeros."
    )
    if "fwd ms" in titles:
        said += " fwd, bwd: the median time of a step's calls, and of their part of the backward."

    hidden = [name for name in ("update", "zero") if name not in titles]
    narrow = [name for name in hidden if any(line.newest(name) for line in made)]
    if narrow:
        said += f" A wider terminal shows {' and '.join(narrow)}."
    for line in made:
        if isinstance(line, FoldedLine):
            said += f" {line.label}{_FOLDED}"
            break
    return Text(said, "dim")
