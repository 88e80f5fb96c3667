"""Findings, counted."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.numbers import counted
from kedge.rules.rule import SEVERITIES, Finding


def tally(findings: Sequence[Finding]) -> str:
    """Count findings by severity: ``1 error, 2 warnings``."""
    counts = [(severity, sum(finding.severity == severity for finding in findings)) for severity in SEVERITIES]
    named = [
        f"{number:,} info" if severity == "info" else counted(number, severity) for severity, number in counts if number
    ]
    return ", ".join(named) or "no findings"
