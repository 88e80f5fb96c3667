"""The verdict on a run in a line.

It has the findings, the rules that could not judge, and the command with which they can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kedge.rules.judgement import Judgement
from kedge.rules.rule import SEVERITIES, Finding, Idle, Lack
from kedge.short_text import counted, listed

#: The most rules that a short line names.
NAMED_LACKS = 3


def tally(findings: Sequence[Finding]) -> str:
    """Return the number of findings by severity: ``1 error, 2 warnings``."""
    numbers = Counter(finding.severity for finding in findings)
    named = []
    for severity in SEVERITIES:
        number = numbers[severity]
        if number and severity == "info":
            named.append(f"{number:,} info")
        elif number:
            named.append(counted(number, severity))
    return ", ".join(named) or "no findings"


def verdict(judgement: Judgement, most: int | None = None) -> str:
    """Return the number of findings, with the rules that could not judge.

    Args:
        judgement: The judgement of the rules on a recording.
        most: The most rules to name that could not judge; all of them if None.
    """
    found = headline(judgement)
    if judgement.is_passed:
        found = f"✓ {found}"
    if not judgement.complete:
        return "; ".join([found, *left_open(judgement, most)])
    if judgement.findings:
        found = f"{found}: {extent(judgement)}"
    if judgement.idle:
        found = f"{found}; {without_work(judgement.idle, most)}"
    return found


def headline(judgement: Judgement) -> str:
    """Return the number of findings; if there are none, how much was judged, or that there may be more."""
    found = tally(judgement.findings)
    if judgement.findings:
        return found
    if judgement.complete:
        return f"{found}: {extent(judgement)}"
    if judgement.ended:
        return found
    return f"{found} so far"


def extent(judgement: Judgement) -> str:
    """Return how many rules have judged, over how many steps."""
    rules = counted(judgement.judged, "rule")
    return f"{rules} over {counted(judgement.measured, 'measured step')}"


def tone(judgement: Judgement) -> str:
    """Return how bad the verdict is: the worst severity, or "fine" for a run that has passed."""
    if judgement.findings:
        return judgement.findings[0].severity
    if judgement.is_passed:
        return "fine"
    return ""


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


def without_work(idle: Sequence[Idle], most: int | None = None) -> str:
    """Return the number of rules that had nothing to judge, and the reasons.

    With all of them also the rules: their names, or of many their number.
    """
    by_reason: dict[str, list[str]] = {}
    for each in idle:
        by_reason.setdefault(each.why, []).append(each.code)
    reasons = list(by_reason)
    if most is None:
        reasons = [f"{why} ({_few(codes)})" for why, codes in by_reason.items()]
    return f"{len(idle)} had nothing to judge: {', '.join(_first(reasons, most))}"


def _few(codes: Sequence[str]) -> str:
    if len(codes) > NAMED_LACKS:
        return counted(len(codes), "rule")
    return ", ".join(codes)


def unjudged(lacks: Iterable[Lack], most: int | None = None) -> str:
    """Return the rules that could not judge, with the samples that each lacked."""
    named = [f"{lack.code} ({lack_of(lack)})" for lack in lacks]
    return f"{counted(len(named), 'rule')} could not judge: {', '.join(_first(named, most))}"


def lack_of(lack: Lack) -> str:
    """Return what a rule lacked: ``2 of 20 measured steps``, ``no end of the program``."""
    if lack.need == 1 and not lack.have:
        return f"no {lack.lacks}"
    return f"{lack.have:,} of {lack.need:,} {lack.lacks}"


def advice(judgement: Judgement) -> Iterator[str]:
    """Yield the command with which every rule can judge, and what to mend before.

    Nothing is to be done if each could.
    """
    helped = list(judgement.helped)
    others = [lack for lack in judgement.unjudged if lack.code not in judgement.helped]
    if helped:
        if others:
            named = listed(helped, NAMED_LACKS)
        elif len(helped) == 1:
            named = "it"
        else:
            named = "all of them"
        yield f"to get enough for {named}: {judgement.command}"

    short = [lack.code for lack in others if lack.grows]
    if short:
        if helped or len(short) < len(judgement.unjudged):
            named = listed(short, NAMED_LACKS)
        elif len(short) == 1:
            named = "it"
        else:
            named = "them"
        if judgement.sound is None:
            yield f"the run is too short for {named}"
        else:
            yield (
                f"to get enough for {named}, mend {judgement.fatal} first: "
                f"nothing counts from step {judgement.sound} on"
            )
