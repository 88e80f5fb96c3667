"""What commands print as JSON, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kedge.short_text import for_json

if TYPE_CHECKING:
    from kedge.report.module_lines import ModuleLine
    from kedge.report.shown_run import ShownRun
    from kedge.rules.judgement import Judgement
    from kedge.rules.rule import Lack

#: The keys of a rule that could not judge.
LACK = ("code", "lacks", "have", "need")
#: The keys of a run, from its manifest.
RUN = ("command", "device", "torch", "python", "started")
#: The keys of a run that has ended.
END = ("exit", "error", "steps", "seconds", "watching")


def judged(name: str, judgement: Judgement) -> dict[str, Any]:
    """Return the findings of a recording, and the rules that could not judge it."""
    return {
        "recording": name,
        "findings": [for_json(finding.entry()) for finding in judgement.findings],
        "unjudged": [_lack(lack) for lack in judgement.unjudged],
        "command": judgement.command or None,
        "unseen": list(judgement.unseen),
    }


def asked(name: str, errors: Sequence[str]) -> dict[str, Any]:
    """Return the good run that a recording was checked against, and the errors that it has itself."""
    return {"recording": name, "errors": list(errors)}


def _lack(lack: Lack) -> dict[str, Any]:
    return {key: getattr(lack, key) for key in LACK}


def reported(
    name: str,
    shown_run: ShownRun,
    lines: Sequence[ModuleLine],
) -> dict[str, Any]:
    """Return a report: the run, its findings, and the newest figures of some modules."""
    recording = shown_run.recording
    run = {key: recording.manifest.get(key) for key in RUN}
    run |= {key: getattr(recording.end, key, None) for key in END}
    run |= {"ended": recording.end is not None, "sampled": len(recording.steps)}
    roots = [
        {"model": root.name, "type": root.type, "parameters": root.parameters}
        for root in recording.roots
    ]
    return {
        **judged(name, shown_run.judgement),
        "run": for_json(run),
        "models": roots,
        "modules": [for_json(_module(line)) for line in lines],
    }


def _module(line: ModuleLine) -> dict[str, Any]:
    out = line.out.last if line.out else None
    gradient = line.gradient.last if line.gradient else None
    return {
        "module": line.label,
        "type": line.type,
        "shape": line.shape,
        "parameters": line.size,
        "out": out,
        "grad": gradient,
        "update": line.update,
        "zero": line.zero,
        "broken": line.broken,
    }


@dataclass(frozen=True)
class ExplainedCode:
    """The page of the code of a finding.

    Attributes:
        code: The code.
        severity: The worst severity of its findings.
        name: What it says, in a few words.
        thresholds: The thresholds that can be set, as they are set.
        page: The text of its page.
    """

    code: str
    severity: str
    name: str
    thresholds: Mapping[str, int | float]
    page: str


def explained(each: ExplainedCode) -> dict[str, Any]:
    """Return a code with its thresholds and its page."""
    return {
        "code": each.code,
        "severity": each.severity,
        "name": each.name,
        "thresholds": for_json(each.thresholds),
        "page": each.page,
    }
