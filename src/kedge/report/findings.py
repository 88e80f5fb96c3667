"""Findings as text: the problem, its place, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from rich.console import Console
from rich.text import Text

from kedge.report.fitted_text import cut, print_paragraph
from kedge.report.program_line import ProgramLine, line_of_finding
from kedge.report.sparkline import GAP, drawable, sparkline
from kedge.rules.evidence import Evidence, LeadUp, SiteCourse
from kedge.rules.rule import Finding
from kedge.short_text import compact
from kedge.store.recording import Recording

STYLES = {"error": "bold red", "warning": "yellow", "info": "blue"}
MARKS = {"error": "✗", "warning": "!", "info": "i"}

#: The findings of one rule that are shown; the others are counted.
SHOWN_PER_RULE = 5

INDENT = 4
#: The most characters of a name in the steps before a finding; longer ones are cut in their middle.
NAME = 32


@dataclass(frozen=True)
class FindingGroup:
    """The findings of one rule and severity."""

    severity: str
    code: str
    findings: tuple[Finding, ...]

    @property
    def title(self) -> str:
        """The severity and the code, with a mark before them."""
        return f"{MARKS[self.severity]} {self.severity} {self.code}"

    @property
    def where(self) -> str:
        """The place of its only finding, or the number of places."""
        if len(self.findings) > 1:
            return f"in {len(self.findings):,} places"
        only = self.findings[0]
        return f"{only.site}, step {only.step}" if only.step >= 0 else only.site

    def told(self, finding: Finding) -> str:
        """Return the message of one of its findings; of several they are the items of a list."""
        return finding.message if len(self.findings) == 1 else f"· {finding.message}"

    def by_remedy(self, most: int | None = None) -> Iterator[tuple[str, list[Finding]]]:
        """Yield its first findings with their remedy, those with the same one together."""
        for remedy, same in groupby(self.findings[:most], key=lambda finding: finding.remedy):
            yield remedy and f"→ {remedy}", list(same)


def grouped(findings: Iterable[Finding]) -> list[FindingGroup]:
    """Return findings grouped by rule and severity, in the order of the first of each group."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.code), []).append(finding)
    return [FindingGroup(*key, tuple(group)) for key, group in groups.items()]


def render_findings(
    recording: Recording,
    findings: Sequence[Finding],
    console: Console,
    limit: int | None = SHOWN_PER_RULE,
) -> None:
    """Print findings, grouped by rule and severity.

    Args:
        recording: The recording.
        findings: The findings, the worst first.
        console: The console to print to.
        limit: The most findings of one group to show; all of them if None.
    """
    for group in grouped(findings):
        mark = f"{MARKS[group.severity]} {group.severity:<7} {group.code}"
        head = Text.assemble((mark, STYLES[group.severity]))
        print_paragraph(head.append(f"  {group.where}"), console)
        for remedy, same in group.by_remedy(limit):
            for finding in same:
                line = line_of_finding(recording, finding)
                if line is not None:
                    _print_line(line, console)
                print_paragraph(Text(group.told(finding)), console, INDENT)
                for course in lead_up(finding.evidence):
                    console.print(Text(" " * INDENT).append_text(course), soft_wrap=True)
            if remedy:
                print_paragraph(Text(remedy, "italic"), console, INDENT)
        left = len(group.findings) - len(group.findings[:limit])
        if left:
            more = Text(f"and {left} more: kedge check lists them", "dim")
            print_paragraph(more, console, INDENT)
        console.print()


def _print_line(line: ProgramLine, console: Console) -> None:
    """Print where a line of the program is, and its text; below if there is no room beside it."""
    place = Text(line.place, "dim")
    text = Text(line.source.text or "", "bold")
    together = Text("  ").join([place, text])
    together.rstrip()
    if together.cell_len <= console.width - INDENT:
        print_paragraph(together, console, INDENT)
        return
    print_paragraph(place, console, INDENT)
    print_paragraph(text, console, 2 * INDENT)


def lead_up(evidence: Evidence) -> list[Text]:
    """Return the steps before a finding as lines, from its evidence; none if it has none.

    The last line is that of the site itself. A cross stands for a step with a non-finite value, a
    gap for a step that was not measured.
    """
    before = evidence.lead_up() or LeadUp()
    steps, sites = before.steps, before.sites
    if len(steps) < 2 or not any(_measured(course) for course in sites.values()):
        return []
    names = []
    for name, course in sites.items():
        kind = " (value)" if course.value else ""
        names.append(cut(name, NAME) + kind)
    width = max(map(len, names))
    lines = []
    for name, course in zip(names, sites.values(), strict=True):
        lines.append(_line(name.ljust(width), course))
    head = Text(f"rms in steps {steps[0]:,} to {steps[-1]:,}", "dim")
    return [head, *reversed(lines)]


def _line(name: str, course: SiteCourse) -> Text:
    values = np.array(course.value or course.rms, np.float64)  # None becomes NaN
    states = course.state
    broken = np.array([state in ("inf", "nan") for state in states], dtype=bool)
    drawn = sparkline(drawable(values), broken, max(len(values), 1)) or GAP

    finite = values[np.isfinite(values)].tolist()
    ends = [compact(value) for value in (*finite[:1], *finite[1:][-1:])]
    if len(broken) and broken[-1]:
        ends.append(str(states[-1]))
    return Text.assemble((f"  {name}  ", "dim"), drawn, ("  " + " → ".join(ends), "dim"))


def _measured(course: SiteCourse) -> bool:
    return sum(state is not None for state in course.state) > 1
