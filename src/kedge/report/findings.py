"""Findings as text: what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from kedge.report.numbers import counted
from kedge.rules.rule import SEVERITIES, Finding

STYLES = {"error": "bold red", "warning": "yellow", "info": "blue"}
MARKS = {"error": "✗", "warning": "!", "info": "i"}

#: How many findings of one rule are shown before the rest is counted.
SHOWN_PER_RULE = 5

#: Longer lines than this are hard to read.
WIDEST = 110

INDENT = 4


def tally(findings: Sequence[Finding]) -> str:
    """Count findings by severity: ``1 error, 2 warnings``."""
    counts = [(severity, sum(finding.severity == severity for finding in findings)) for severity in SEVERITIES]
    named = [f"{number:,} info" if severity == "info" else counted(number, severity) for severity, number in counts if number]
    return ", ".join(named) or "no findings"


def render_findings(findings: Sequence[Finding], console: Console, limit: int | None = SHOWN_PER_RULE) -> None:
    """Draw findings, those of one rule and severity together.

    Args:
        findings: The findings, the worst first.
        console: Where they are drawn.
        limit: How many of one group are shown; all of them if None.
    """
    order: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        order.setdefault((finding.severity, finding.code), []).append(finding)
    for (severity, code), group in order.items():
        _render_group(severity, code, group, console, limit)


def _render_group(severity: str, code: str, group: list[Finding], console: Console, limit: int | None) -> None:
    head = Text.assemble((f"{MARKS[severity]} {severity:<7} {code}", STYLES[severity]))
    head.append(f"  {_where(group[0])}" if len(group) == 1 else f"  at {counted(len(group), 'site')}")
    console.print(head)
    for remedy, same in groupby(group[:limit], key=lambda finding: finding.remedy):
        for finding in same:
            place = [] if len(group) == 1 else [(f"{_where(finding)}: ", "bold")]
            _print_indented(Text.assemble(*place, finding.message), console)
        if remedy:
            _print_indented(Text(f"→ {remedy}", "italic"), console)
    left = len(group) - len(group[:limit])
    if left:
        _print_indented(Text(f"and {left} more: kedge check lists them", "dim"), console)
    console.print()


def _where(finding: Finding) -> str:
    return f"{finding.site}, step {finding.step}" if finding.step >= 0 else finding.site


def _print_indented(text: Text, console: Console) -> None:
    for line in text.wrap(console, min(console.width, WIDEST) - INDENT):
        line.rstrip()
        console.print(Text(" " * INDENT).append_text(line))
