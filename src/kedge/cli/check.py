"""``kedge check``: say what is wrong with a run, for people and for programs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kedge.cli.config import add_config, configured_rules

if TYPE_CHECKING:
    from kedge.rules.rule import Finding
    from kedge.store.recording import Recording


class Check:
    """Say what is wrong with a run; exit with 1 if something is an error.

    Rules and their thresholds can be set for a project, in [tool.kedge] of its pyproject.toml.

    With --json, one object is printed:
      {"recording": RUN, "findings": [{"code", "severity", "site", "step", "message",
                                       "evidence", "confidence", "remedy"}, ...]}
    Numbers that JSON does not have are the strings "nan", "inf" and "-inf".
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Say what can be typed after the command."""
        parser.add_argument("recording", metavar="RUN", help="the recording, as kedge run named it")
        parser.add_argument("--json", action="store_true", help="print the findings as JSON")
        parser.add_argument("--select", metavar="CODES", help="only these rules, with commas between")
        parser.add_argument("--ignore", metavar="CODES", help="all rules but these, with commas between")
        add_config(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Print the findings."""
        from kedge.rules.registry import check
        from kedge.store.recording import Recording

        rules = configured_rules(args.select, args.ignore, args.config)
        recording = Recording.open(args.recording)
        findings = check(recording, rules)
        if args.json:
            print(json.dumps(_document(args.recording, findings), indent=2, allow_nan=False))
        else:
            _print(recording, findings, len(rules))
        return int(any(finding.severity == "error" for finding in findings))


def _print(recording: Recording, findings: Sequence[Finding], rules: int) -> None:
    from kedge.report.findings import render_findings
    from kedge.report.numbers import counted
    from kedge.report.tally import tally
    from kedge.report.terminal import console_for

    console = console_for()
    render_findings(findings, console, limit=None)
    steps = counted(len(recording.steps), "sampled step")
    console.print(f"{tally(findings)}: {counted(rules, 'rule')} over {steps}", soft_wrap=True)


def _document(name: str, findings: Iterable[Finding]) -> dict[str, Any]:
    return {"recording": name, "findings": [_plain(asdict(finding)) for finding in findings]}


def _plain(value: Any) -> Any:
    """Turn what evidence may hold into what JSON has."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
