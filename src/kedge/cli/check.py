"""``kedge check``: the findings of a run, for people and for programs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kedge.cli.config import add_config
from kedge.cli.documents import asked, judged
from kedge.cli.output import print_json
from kedge.cli.progress import add_quiet, progress
from kedge.cli.recordings import add_recording, open_recording, recording_named
from kedge.short_text import counted, listed
from kedge.stderr import say

if TYPE_CHECKING:
    from kedge.rules.judgement import Judgement
    from kedge.rules.rule import Rule
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

    --against GOOD asks of the run what held in a good run of the same program: which parameters
    move, modes, dtypes, the loss, calls in a step, optimizers, learning rates, orders of magnitude.
    Both may have another seed, length and batch size. What does not hold is a finding, DEPARTS.

    Rules and their thresholds can be set for a project, in [tool.kedge] of its pyproject.toml.

    --json prints one object:
      {"recording": RUN, "findings": [{"code", "severity", "site", "step", "message",
                                       "evidence", "confidence", "remedy"}, ...],
       "unjudged": [{"code", "lacks", "have", "need"}, ...], "command": TEXT or null,
       "unseen": [TEXT, ...]}
    and with --against: "against": {"recording": GOOD, "errors": [CODE, ...]}.
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
        parser.add_argument(
            "--against",
            metavar="GOOD",
            help="a recording of a good run of the same program, whose relations must hold here",
        )
        add_quiet(parser)
        add_config(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Print the findings."""
        from kedge.report.what_ran import is_written
        from kedge.rules.judgement import judge
        from kedge.rules.project_config import configured_rules

        rules = configured_rules(args.select, args.ignore, args.config)
        name = recording_named(args.recording)
        recording = open_recording(name)
        with progress("judging"):
            judgement = judge(recording, rules)
        if is_written(recording) is False:
            judgement = replace(judgement, ended=True)
        good = None
        if args.against is not None:
            good = _good_run(args.against, rules)
            judgement = _with_departures(judgement, recording, good)
        if args.format == "json":
            document = judged(name, judgement)
            if good is not None:
                document["against"] = asked(good.name, good.errors)
            print_json(document)
        elif args.format == "github":
            _annotate(recording, judgement)
        else:
            _print(recording, judgement)
        if good is not None and args.format != "json":
            print(_told_against(judgement, good))
        failing = FAILING[args.fail_on]
        if any(finding.severity in failing for finding in judgement.findings):
            return 1
        if args.strict and not judgement.complete:
            return UNJUDGED
        return 0


@dataclass(frozen=True)
class GoodRun:
    """The good run that a recording is checked against.

    Attributes:
        name: The name of its recording.
        recording: The recording.
        errors: The codes of the errors that it has itself.
    """

    name: str
    recording: Recording
    errors: tuple[str, ...]


def _good_run(named: str, rules: Sequence[Rule]) -> GoodRun:
    """Return the good run, and say so if it has errors itself."""
    from kedge.rules.judgement import judge

    name = recording_named(named)
    recording = open_recording(name)
    with progress("judging the good run"):
        found = judge(recording, rules).findings
    errors = tuple(dict.fromkeys(each.code for each in found if each.severity == "error"))
    if errors:
        say(
            f"{name} has errors itself ({listed(errors)}): what held there may be wrong; "
            "choose a run without them"
        )
    return GoodRun(name, recording, errors)


def _with_departures(judgement: Judgement, recording: Recording, good: GoodRun) -> Judgement:
    """Return a judgement with what held in a good run and does not hold here among its findings."""
    from kedge.compare.against.departures import departures
    from kedge.rules.rule import SEVERITIES

    with progress("comparing"):
        found = departures(recording, good.recording)
    findings = sorted(
        (*found, *judgement.findings), key=lambda each: SEVERITIES.index(each.severity)
    )
    return replace(judgement, findings=tuple(findings))


def _told_against(judgement: Judgement, good: GoodRun) -> str:
    from kedge.compare.against.departs import CODE

    number = sum(finding.code == CODE for finding in judgement.findings)
    if number:
        return f"{counted(number, 'departure')} from {good.name}"
    return f"✓ what held in {good.name} holds here"


def _annotate(recording: Recording, judgement: Judgement) -> None:
    from kedge.cli.github import annotation
    from kedge.report.verdict import advice, verdict

    workspace = os.environ.get("GITHUB_WORKSPACE") or os.getcwd()
    for finding in judgement.findings:
        print(annotation(recording, finding, workspace))
    for line in (verdict(judgement), *advice(judgement)):
        print(line)


def _print(recording: Recording, judgement: Judgement) -> None:
    from kedge.report.findings import render_findings
    from kedge.report.terminal import console_for
    from kedge.report.verdict import advice, verdict

    console = console_for()
    render_findings(recording, judgement.findings, console, limit=None)
    for line in (verdict(judgement), *advice(judgement)):
        console.print(line, soft_wrap=True, markup=False)
