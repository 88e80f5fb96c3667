"""The verdict on a run in a line: the findings, the rules that could not judge, and the command with which they can."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kedge.rules.judgement import Judgement
from kedge.rules.rule import SEVERITIES, Finding, Lack
from kedge.short_text import counted, listed

#: The most rules that a short line names.
NAMED_LACKS = 3


def tally(findings: Sequence[Finding]) -> str:
    """Return the number of findings by severity: ``1 error, 2 warnings``."""
    counts = [
        (severity, sum(finding.severity == severity for finding in findings))
        for severity in SEVERITIES
    ]
    named = [
        f"{number:,} info" if severity == "info" else counted(number, severity)
        for severity, number in counts
        if number
    ]
    return ", ".join(named) or "no findings"


def verdict(judgement: Judgement, most: int | None = None) -> str:
    """Return the number of findings, with the rules that could not judge.

    Args:
        judgement: The judgement of the rules on a recording.
        most: The most rules to name that could not judge; all of them if None.
    """
    if judgement.complete:
        mark = "" if judgement.findings else "✓ "
        asked = counted(judgement.rules, "rule")
        return f"{mark}{tally(judgement.findings)}: {asked} over {counted(judgement.measured, 'measured step')}"
    found = tally(judgement.findings) if judgement.findings else _none(judgement)
    return "; ".join([found, *left_open(judgement, most)])


def left_open(judgement: Judgement, most: int | None = None) -> Iterator[str]:
    """Yield the models that were not watched, and the rules that could not judge.

    Args:
        judgement: The judgement of the rules on a recording.
        most: The most rules to name; all of them if None.
    """
    if judgement.unseen:
        yield not_watched(judgement, most)
    if judgement.unjudged:
        yield unjudged(judgement.unjudged, most)


def not_watched(judgement: Judgement, most: int | None = None) -> str:
    """Return what was not watched."""
    return f"not watched: {', '.join(_first(judgement.unseen, most))}"


def _first(texts: Sequence[str], most: int | None) -> list[str]:
    if most is None or len(texts) <= most:
        return list(texts)
    return [*texts[:most], f"{len(texts) - most} more"]


def unjudged(lacks: Iterable[Lack], most: int | None = None) -> str:
    """Return the rules that could not judge, with the samples that each lacked."""
    named = [f"{lack.code} ({lack_of(lack)})" for lack in lacks]
    return f"{counted(len(named), 'rule')} could not judge: {', '.join(_first(named, most))}"


def lack_of(lack: Lack) -> str:
    """Return the samples that a rule lacked: ``2 of 20 measured steps``, ``no end of the program``."""
    if lack.need == 1 and not lack.have:
        return f"no {lack.lacks}"
    return f"{lack.have:,} of {lack.need:,} {lack.lacks}"


def _none(judgement: Judgement) -> str:
    return "no findings" if judgement.ended else "no findings so far"


def advice(judgement: Judgement) -> Iterator[str]:
    """Yield the command with which every rule can judge, and what to mend before; nothing if each could."""
    helped, others = (
        list(judgement.helped),
        [x for x in judgement.unjudged if x.code not in judgement.helped],
    )
    if helped:
        all_of_them = (
            "to get enough for it" if len(helped) == 1 else "to get enough for all of them"
        )
        yield f"{all_of_them if not others else f'to get enough for {listed(helped, NAMED_LACKS)}'}: {judgement.command}"
    short = [lack.code for lack in others if lack.grows]
    if short:
        all_of_them = "it" if len(short) == 1 else "them"
        named = (
            listed(short, NAMED_LACKS)
            if helped or len(short) < len(judgement.unjudged)
            else all_of_them
        )
        yield (
            f"the run is too short for {named}"
            if judgement.sound is None
            else f"to get enough for {named}, mend {judgement.fatal} first: nothing counts from step {judgement.sound} on"
        )
