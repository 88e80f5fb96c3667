"""What the rules make of a recording: the findings, and the rules that could not judge it.

"No findings" means something only where every rule could judge. So each rule says what it lacks, and the judgement
names the whole command that would supply it, unless the run had these options already, or is too short with any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kedge.rules.command import closer_look
from kedge.rules.registry import ALL, check
from kedge.rules.rule import Finding, Lack, Rule
from kedge.store.recording import Recording


@dataclass(frozen=True)
class Judgement:
    """The findings of a recording, and how far they can be relied on.

    Attributes:
        findings: What was found, the worst first.
        unjudged: One entry for each rule that could not judge.
        rules: How many rules were asked.
        measured: How many steps were measured in full.
        command: What to type so that all or most of them can; empty if no option would help.
        helped: The codes of the rules that the command helps.
    """

    findings: tuple[Finding, ...]
    unjudged: tuple[Lack, ...]
    rules: int
    measured: int
    command: str = ""
    helped: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every rule could judge."""
        return not self.unjudged


def judge(recording: Recording, rules: Iterable[Rule] | None = None) -> Judgement:
    """Run rules over a recording, and ask each whether it could judge.

    Args:
        recording: What to judge; it may still be growing, or have been cut short.
        rules: The rules to run; all of them, with their default thresholds, if None.
    """
    asked = list(ALL if rules is None else rules)
    return judgement_of(recording, check(recording, asked), asked)


def judgement_of(recording: Recording, findings: Iterable[Finding], rules: Iterable[Rule] | None = None) -> Judgement:
    """Return the judgement of a recording whose findings are known."""
    asked, found = list(ALL if rules is None else rules), tuple(findings)
    spoke = {finding.code for finding in found}
    lacks = [lack for rule in asked if rule.code not in spoke and (lack := rule.lacking(recording)) is not None]
    helped = tuple(lack.code for lack in lacks if helps(recording, lack))
    command = closer_look(recording) if helped else ""
    return Judgement(found, tuple(lacks), len(asked), len(recording.steps), command, helped if command else ())


def helps(recording: Recording, lack: Lack) -> bool:
    """Whether a rule would have enough if every step of a run as long as this one were measured."""
    length, measured = _length(recording), len(recording.steps)
    expected = lack.have * length / measured if lack.have and measured else length
    return lack.grows and expected >= lack.need


def _length(recording: Recording) -> int:
    """Return how many steps the run had, as far as is known."""
    end = recording.end or {}
    last = int(recording.steps[-1]) + 1 if len(recording.steps) else 0
    return max(int(end.get("steps") or 0), last)
