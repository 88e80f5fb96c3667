"""``kedge check``: the findings of a run, for people and for programs."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from kedge.cli.config import add_config
from kedge.cli.documents import judged
from kedge.cli.output import print_json
from kedge.cli.progress import add_quiet, progress
from kedge.cli.recordings import add_recording, open_recording, recording_named

if TYPE_CHECKING:
    from kedge.rules.judgement import Judgement
    from kedge.store.recording import Recording

UNJUDGED = 3
"""The exit status of ``--strict`` if a rule had too few samples to judge."""

FAILING = {
    "error": ("error",),
    "warning": ("error", "warning"),
    "info": ("error", "warning", "info"),
    "never": (),
}
"""The severities that fail, by the word after ``--fail-on``."""


class CheckCommand:
    """List the problems of a run; exit with 1 if there is an error.

    --fail-on warning also exits with 1 for a warning, --fail-on info for any finding, --fail-on
    never for none.

    If a rule had too little data to judge, the last lines name it and the command that collects
    enough; with --strict the exit status is then 3.

    Rules and their thresholds can be set for a project, in [tool.kedge] of its pyproject.toml.

    --json prints one object:
      {"recording": RUN, "findings": [{"code", "severity", "site", "step", "message",
                                       "evidence", "confidence", "remedy"}, ...],
       "unjudged": [{"code", "lacks", "have", "need"}, ...], "command": TEXT or null,
       "unseen": [TEXT, ...]}
    Numbers that JSON does not have are the strings "nan", "inf" and "-inf".
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        add_recording(parser)
        parser.add_argument(
            "--format",
            choices=("text", "json", "github"),
            default="text",
            help=(
                "github: annotations, "
                "which GitHub Actions shows at the lines of the program (default: text)"
            ),
        )
        parser.add_argument(
            "--json",
            dest="format",
            action="store_const",
            const="json",
            help="the same as --format json",
        )
        parser.add_argument(
            "--fail-on",
            choices=FAILING,
            default="error",
            help="least severity of a finding that makes the exit status 1 (default: error)",
        )
        parser.add_argument(
            "--strict",
            action="store_true",
            help="exit with 3 if a rule had too little data to judge",
        )
        parser.add_argument(
            "--select",
            metavar="CODES",
            help="run only these rules (codes separated by commas)",
        )
        parser.add_argument(
            "--ignore",
            metavar="CODES",
            help="run all rules except these (codes separated by commas)",
        )
        add_quiet(parser)
        add_config(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Print the findings."""
        from kedge.rules.judgement import judge
        from kedge.rules.project_config import configured_rules

        rules = configured_rules(args.select, args.ignore, args.config)
        name = recording_named(args.recording)
        recording = open_recording(name)
        with progress("judging"):
            judgement = judge(recording, rules)
        if args.format == "json":
            print_json(judged(name, judgement))
        elif args.format == "github":
            _annotate(recording, judgement)
        else:
            _print(judgement)
        failing = FAILING[args.fail_on]
        if any(finding.severity in failing for finding in judgement.findings):
            return 1
        if args.strict and not judgement.complete:
            return UNJUDGED
        return 0


def _annotate(recording: Recording, judgement: Judgement) -> None:
    from kedge.cli.github import annotation
    from kedge.report.verdict import advice, verdict

    workspace = os.environ.get("GITHUB_WORKSPACE") or os.getcwd()
    for finding in judgement.findings:
        print(annotation(recording, finding, workspace))
    for line in (verdict(judgement), *advice(judgement)):
        print(line)


def _print(judgement: Judgement) -> None:
    from kedge.report.findings import render_findings
    from kedge.report.terminal import console_for
    from kedge.report.verdict import advice, verdict

    console = console_for()
    render_findings(judgement.findings, console, limit=None)
    for line in (verdict(judgement), *advice(judgement)):
        console.print(line, soft_wrap=True, markup=False)
