"""The judgement of a recording: the findings, and the rules that could not judge it.

"No findings" means something only if every rule could judge. So each rule reports what it lacks,
and the judgement names the whole command that would supply it, unless the run had these options
already, or is too short with any. A run in which a NaN was born, and that did not recover, is as
long as the steps before it: those after it show nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kedge.rules.command import closer_look
from kedge.rules.recorded.trained import trains
from kedge.rules.registry import ALL, by_code, can_judge, in_order
from kedge.rules.rule import Finding, Idle, Lack, Rule
from kedge.store.events import UnseenDetail, UnseenEvent
from kedge.store.recording import Recording

UNCHANGED = "gradients came, but no parameter was seen to change"
"""Why rules on training have nothing to judge where the program may train in a way that is not seen."""


@dataclass(frozen=True)
class Judgement:
    """The findings of a recording, and how far they can be relied on.

    Attributes:
        findings: The findings, the worst first.
        unjudged: One entry for each rule that could not judge.
        rules: The number of rules that ran.
        idle: Those of them that had nothing to judge.
        measured: The number of steps that were measured in full.
        command: The command with which all or most of the others can judge; empty if no option
            would help.
        helped: The codes of the rules that the command helps.
        sound: The number of steps before the training was ended by a fault, as by the first NaN;
            None if there was none, or the run recovered.
        fatal: The code of the rule that found this fault.
        ended: Whether the recording has its end.
    """

    findings: tuple[Finding, ...]
    unjudged: tuple[Lack, ...]
    rules: int
    measured: int
    command: str = ""
    helped: tuple[str, ...] = ()
    sound: int | None = None
    fatal: str = ""
    ended: bool = False
    idle: tuple[Idle, ...] = ()
    unseen: tuple[str, ...] = ()
    "Computations that Kedge could not watch, in words."
    left: int = 0
    "The number of rules that did not run, because the time was over."

    @property
    def complete(self) -> bool:
        """Whether every rule ran and could judge, and Kedge could watch all computations."""
        return not self.unjudged and not self.unseen and not self.left

    @property
    def is_passed(self) -> bool:
        """Whether nothing was found, and nothing may have escaped."""
        is_unseen = any(each.why == UNCHANGED for each in self.idle)
        return self.complete and not self.findings and not is_unseen

    @property
    def judged(self) -> int:
        """The number of rules that had something to judge."""
        return self.rules - len(self.idle)


def judge(
    recording: Recording,
    rules: Iterable[Rule] | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Judgement:
    """Return the judgement of some rules about a recording.

    Args:
        recording: The recording; it may still be growing, or have been cut short.
        rules: The rules to run; all of them, with their default thresholds, if None.
        is_over: Whether the time for judging is over; asked before each rule, and the rest does not
            run.
    """
    asked = _asked(rules)
    ran: list[Rule] = []
    each: list[Finding] = []
    for rule in asked:
        if is_over():
            break
        ran.append(rule)
        if can_judge(rule, recording):
            each += rule.check(recording)
    judging = [rule for rule in ran if can_judge(rule, recording)]
    judgement = judgement_of(recording, in_order(recording, judging, each), ran)
    return replace(judgement, left=len(asked) - len(ran))


def judgement_of(
    recording: Recording, findings: Iterable[Finding], rules: Iterable[Rule] | None = None
) -> Judgement:
    """Return the judgement of a recording whose findings are known."""
    asked = _asked(rules)
    found = tuple(findings)
    spoke = {finding.code for finding in found}
    lacks = [
        lack
        for rule in asked
        if rule.code not in spoke and (lack := _lack_of(rule, recording)) is not None
    ]
    ends = {code for code, rule in by_code(asked).items() if rule.ends_training}
    idle = [
        Idle(rule.code, why)
        for rule in asked
        if rule.code not in spoke | {lack.code for lack in lacks}
        and (why := _idle(rule, recording))
    ]
    fatal = min(
        (f for f in found if f.code in ends and f.severity == "error" and f.step >= 0),
        key=lambda finding: finding.step,
        default=None,
    )
    sound = None
    ended_by = ""
    if fatal is not None:
        sound = fatal.step
        ended_by = fatal.code

    helped = tuple(lack.code for lack in lacks if helps(recording, lack, sound))
    command = ""
    if helped:
        command = closer_look(recording)
    if not command:
        helped = ()
    return Judgement(
        findings=found,
        unjudged=tuple(lacks),
        rules=len(asked),
        measured=len(recording.steps),
        command=command,
        helped=helped,
        sound=sound,
        fatal=ended_by,
        ended=recording.end is not None,
        idle=tuple(idle),
        unseen=tuple(dict.fromkeys(map(_words, recording.of(UnseenEvent)))),
    )


def _asked(rules: Iterable[Rule] | None) -> list[Rule]:
    if rules is None:
        return list(ALL)
    return list(rules)


def _lack_of(rule: Rule, recording: Recording) -> Lack | None:
    if not can_judge(rule, recording):
        return Lack(rule.code, "beginning of the training", 0, 1, grows=False)
    return rule.lacking(recording)


def _idle(rule: Rule, recording: Recording) -> str:
    """Return why a rule has nothing to judge; empty if it has."""
    if rule.of_training and not trains(recording):
        if any(root.trained for root in recording.roots):
            return "no gradient was recorded"
        if any(len(recording.rows(site)) for site in recording.of_kind("out.grad")):
            return UNCHANGED
        return "nothing was trained"
    return rule.idle(recording)


def helps(recording: Recording, lack: Lack, sound: int | None = None) -> bool:
    """Whether a rule would have enough if every step of a run as long as this one, or its sound steps, were measured."""
    length = _length(recording)
    if sound is not None:
        length = min(length, sound)
    measured = len(recording.steps)
    expected = float(length)
    if lack.have and measured:
        expected = lack.have * length / measured
    return lack.grows and expected >= lack.need


def _words(event: UnseenEvent) -> str:
    """Return a description of computations that Kedge could not watch."""
    detail = event.detail or UnseenDetail()
    if event.what == "children":
        time = ""
        if detail.seconds:
            time = f"{detail.seconds:.3g} s of "
        return f"{time}computation in child processes"
    if event.what == "hook-tables":
        return "modules, because the program replaced PyTorch's global hooks"
    if event.what == "failed":
        return f"{detail.name} ({detail.cause})"
    return event.what


def _length(recording: Recording) -> int:
    """Return the number of steps of the run, as far as it is known."""
    ended = 0
    if recording.end is not None:
        ended = recording.end.steps or 0
    last = 0
    if len(recording.steps):
        last = int(recording.steps[-1]) + 1
    return max(ended, last)
