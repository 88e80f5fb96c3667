"""Findings as text: the problem, its place, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from kedge.report.fitted_text import print_paragraph
from kedge.report.leadup import lead_up
from kedge.rules.rule import Finding

STYLES = {"error": "bold red", "warning": "yellow", "info": "blue"}
MARKS = {"error": "✗", "warning": "!", "info": "i"}

#: The findings of one rule that are shown; the others are counted.
SHOWN_PER_RULE = 5

INDENT = 4


def render_findings(
    findings: Sequence[Finding], console: Console, limit: int | None = SHOWN_PER_RULE
) -> None:
    """Print findings, grouped by rule and severity.

    Args:
        findings: The findings, the worst first.
        console: The console to print to.
        limit: The most findings of one group to show; all of them if None.
    """
    order: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        order.setdefault((finding.severity, finding.code), []).append(finding)
    for (severity, code), group in order.items():
        _render_group(severity, code, group, console, limit)


def _render_group(
    severity: str, code: str, group: list[Finding], console: Console, limit: int | None
) -> None:
    head = Text.assemble((f"{MARKS[severity]} {severity:<7} {code}", STYLES[severity]))
    head.append(f"  {_where(group[0])}" if len(group) == 1 else f"  in {len(group):,} places")
    print_paragraph(head, console)
    for remedy, same in groupby(group[:limit], key=lambda finding: finding.remedy):
        for finding in same:
            print_paragraph(
                Text(finding.message if len(group) == 1 else f"· {finding.message}"),
                console,
                INDENT,
            )
            for line in lead_up(finding.evidence):
                console.print(Text(" " * INDENT).append_text(line), soft_wrap=True)
        if remedy:
            print_paragraph(Text(f"→ {remedy}", "italic"), console, INDENT)
    left = len(group) - len(group[:limit])
    if left:
        print_paragraph(Text(f"and {left} more: kedge check lists them", "dim"), console, INDENT)
    console.print()


def _where(finding: Finding) -> str:
    return f"{finding.site}, step {finding.step}" if finding.step >= 0 else finding.site
