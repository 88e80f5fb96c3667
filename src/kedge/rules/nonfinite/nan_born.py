"""NaN and infinity: where the first one was made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kedge.rules.nonfinite.bad_steps import NAN, TOTAL, Course, Moment, complete, course, excuse, judged
from kedge.rules.nonfinite.births import (
    BACKWARD,
    Birth,
    backward_birth,
    explains,
    forward_births,
    loss_birth,
    parameter_birth,
    update_birth,
    written_birth,
)
from kedge.rules.nonfinite.from_repro import with_dump
from kedge.rules.nonfinite.glanced_steps import AGAIN, Glance, glance_of, is_glance, makes_again
from kedge.rules.nonfinite.producer import with_producer
from kedge.rules.nonfinite.wording import Telling
from kedge.rules.rule import SEVERITIES, Finding, Lack, Severity
from kedge.rules.wiring import Wiring, wire
from kedge.store.recording import Recording, SiteInfo

#: Births between a backward and the next forward, and in parameters.
OPTIMIZER = ("parameter", "stepped", "unseen", "update", "within", "written")


@dataclass(frozen=True)
class NanBorn:
    """Somewhere a NaN or an infinity was made out of finite numbers.

    What it says:
        A NaN spreads: a few operations after its birth nearly every output and gradient holds one,
        and after the next optimizer step every parameter does. This rule names the place where it
        was made, and tells it from the sites that only passed it on.

    Formula:
        Finite in and parameters finite, not finite out: made here. Not finite on both sides:
        propagated. Not finite in, finite out: healed, as by a mask or nan_to_num. Forward: a site is
        a birth if its output is not finite while its inputs and its own parameters are, and no
        module inside it explains it. If a module's input is not finite although the outputs it came
        from were, the birth lies between them, in the forward of the module that holds both.
        Backward: of the gradients that are not finite, the one nearest to the loss; it was made by
        the module that takes this output in, if the gradient that arrived there was finite, and by
        the loss if there is no such module. If other modules take it too, or an operation in a container's
        own forward can, all of them are named; a linear map whose numbers are too small to leave the
        range is not. A parameter's gradient that is not finite while that of
        its module's output is was made in that module's backward. If all gradients were finite when
        they were made, but not when the optimizer got them, the program made it in between. A
        parameter that is not finite, and was at the last look, was made by the optimizer's steps.
        A loss that is not finite while all outputs are was made by the program's own operations after them.
        A linear map whose numbers are too small to leave the range made nothing of them: what it took in was not
        what it takes in other steps, or its parameters changed between two calls.

    Window:
        Every step in which something was not finite, the light ones included; there only norms
        are known, and for gradients only those of parameters. After the step from which the
        run never recovers nothing more is reported: everything later is a consequence. Steps that
        were not looked at at all are said to be so. Of a step that was glanced at only gradients of
        parameters are known: there it is said between which steps it was made, and a module is named only if the next
        step that was seen shows it making something not finite out of finite inputs and parameters.

    Thresholds:
        - max_findings (5): how many independent births are reported. One is the rule; the number
          only keeps a broken recording from filling the screen.

    Severity:
        - error: a NaN, or an infinity that reached a gradient, the loss or what the model returns.
        - warning: a NaN that something later replaced by finite values; -inf in what a model
          returns without training; gradients or updates that were not finite in a step after which
          the run went on healthily.
        - info: such gradients in a run with float16, where loss scaling skips the step on purpose, so
          that the optimizer never gets them; an infinity where neither gradients nor what the model
          returns were watched.
        - nothing, where only infinities appeared and all gradients and returned values were finite,
          or where what was returned held -inf in places and all gradients were finite: masks do so
          by design.

    Evidence:
        What kind of value, in how many elements; the program's line that calls the module, and the
        autograd node of the value; the range of the values next to it; which other sites held
        something that is not finite in the same step (propagators), and which modules took it in and
        returned finite values (healed); who else may have made it (also); what a glance and the step after it
        saw (glance); a parameter that had grown a thousandfold (growth); and under
        before the last 16 recorded steps of the site and of what went into it, with rms, absmax and
        state. The grades follow msProbe's reading of overflows: normal in and abnormal out is the
        critical one.

    Remedy:
        It depends on what made it, and is given with the finding: an operation outside its domain, a
        product that left the range of its dtype, a derivative that is infinite, a batch with missing
        values, a learning rate that is too large. Where the autograd graph of the loss was searched, the operation and
        the program's line are named. kedge run --dump keeps what the module was given, so that its call can be run
        again alone.
    """

    max_findings: int = 5

    code: ClassVar[str] = "NAN-BORN"
    name: ClassVar[str] = "a NaN or an infinity was made here"
    severity: ClassVar[Severity] = "error"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give one finding for every independent birth."""
        seen = course(recording)
        if not seen.moments:
            return with_producer(recording, seen, with_dump(recording, seen, []))
        cases: dict[tuple[str, int], list[_Case]] = {}
        for case in _cases(recording, wire(recording), seen):
            cases.setdefault(case.kind, []).append(case)
        told = [_finding(recording, same, len(cases)) for same in list(cases.values())[: self.max_findings]]
        return with_producer(recording, seen, with_dump(recording, seen, told))

    def lacking(self, recording: Recording) -> Lack | None:
        """Return that nothing was recorded at all; any step that was looked at can be judged."""
        seen = any(len(recording.rows(site)) for site in recording.sites)
        return None if seen else Lack(self.code, "recorded step", 0, 1)


@dataclass(frozen=True)
class _Case:
    """One birth in one step.

    ``later`` is the step after a glance of which more was seen; ``glance`` the one before, in which the birth showed first.
    """

    wiring: Wiring
    moment: Moment
    birth: Birth
    severity: Severity
    recovered: bool
    later: Moment | None = None
    glance: Moment | None = None

    @property
    def kind(self) -> tuple[str, int]:
        """What it shares with the same birth in another step.

        Off schedule a gradient is seen at fewer sites, and so the same birth at another one.
        """
        skipped = self.recovered and self.birth.how in (*BACKWARD, "glanced")
        return ("backward", -1) if skipped else (self.birth.how, self.birth.site)

    @property
    def step(self) -> int:
        """The first step in which it showed."""
        return self.moment.step if self.glance is None else self.glance.step

    def telling(self, recording: Recording) -> Telling | Glance:
        """Give what finds the words for it."""
        told = Telling(recording, self.wiring, self.moment, self.birth)
        if self.birth.how == "glanced" or self.glance is not None:
            return Glance(told, self.glance or self.moment, self.later)
        return told


def _cases(recording: Recording, wiring: Wiring, seen: Course) -> Iterator[_Case]:
    def known(start: int) -> Iterator[Moment]:
        return (complete(excuse(raw, seen.habitual), wiring) for raw in seen.moments[start:])

    returned = judged(recording)[1]
    for at, moment in enumerate(known(0)):
        recovered = seen.recovered(recording, moment)
        if is_glance(wiring, moment):
            yield from _glanced(wiring, moment, known(at + 1), recovered)
        else:
            for birth in _births(wiring, moment, returned):
                severity = _severity(recording, moment, birth, recovered)
                if severity:
                    yield _Case(wiring, moment, birth, severity, recovered)
        if not recovered:
            return


def _glanced(wiring: Wiring, moment: Moment, others: Iterable[Moment], recovered: bool) -> Iterator[_Case]:
    """Tell what is known of a step of which only gradients were seen, with the step after it of which more was."""
    severity: Severity = "warning" if recovered else "error"
    later = next((m for m in others if not is_glance(wiring, m)), None)
    if later is None or later.sane > moment.step:
        later = None
    else:
        for birth in _births(wiring, later, judged(wiring.recording)[1]):
            if makes_again(wiring, later, birth):
                yield _Case(wiring, later, birth, severity, recovered, glance=moment)
                return
    yield _Case(wiring, moment, glance_of(wiring, moment), severity, recovered, later=later)


def _births(wiring: Wiring, moment: Moment, returned: Iterable[SiteInfo]) -> list[Birth]:
    """Find the births of one step: forward, backward, in the optimizer, in this order."""
    forward = forward_births(wiring, moment)
    if not forward and (lost := loss_birth(wiring, moment)):
        return [lost]
    backward = None
    if not moment.tainted and not moment.bad(site.id for site in returned):
        backward = backward_birth(wiring, moment)
    if backward:
        causes = [birth for birth in forward if explains(wiring, moment, birth, backward)]
        return causes or [backward]
    if forward:
        return forward
    other = written_birth(wiring, moment) or parameter_birth(wiring, moment) or update_birth(wiring, moment)
    return [other] if other else []


def _severity(recording: Recording, moment: Moment, birth: Birth, recovered: bool) -> Severity | None:
    if birth.how in OPTIMIZER or birth.how == "made":
        return "warning" if recovered else "error"
    if birth.how in BACKWARD:
        half = any(site.dtype == "float16" for site in recording.sites)
        harmless = recovered or (half and not _stepped(recording, moment))
        return "error" if not harmless else "info" if half else "warning"
    if (moment.states == NAN).any():
        return "warning" if moment.sound else "error"
    if moment.sound:
        return None
    gradients, returned = judged(recording)
    reached = moment.bad(site.id for site in (*gradients, *returned))
    if not reached:
        return "info"
    trained = moment.finite(site.id for site in gradients) is not None
    return "error" if trained or _above(recording, moment, reached) else "warning"


def _stepped(recording: Recording, moment: Moment) -> bool:
    """Tell whether an optimizer stepped in a moment: it is looked at with the parameters before it does."""
    seen = moment.finite(site.id for kind in ("param", TOTAL) for site in recording.of_kind(kind))
    return seen is not None


def _kept_away(moment: Moment, totals: Iterable[SiteInfo]) -> bool:
    """Tell whether gradients that were not finite never came to the optimizer: what it got was."""
    return moment.finite(site.id for site in totals) is True


def _above(recording: Recording, moment: Moment, sites: Iterable[int]) -> bool:
    """Tell whether some sites hold more than -inf in places: +inf, or a loss."""
    for site in sites:
        info, rows = recording.sites[site], recording.rows(recording.sites[site])
        now = rows.step == moment.step
        if not info.shape or (rows.sum[now] != -np.inf).any() or (rows.max[now] == np.inf).any():
            return True
    return False


def _finding(recording: Recording, same: list[_Case], births: int) -> Finding:
    worst = min(same, key=lambda case: (SEVERITIES.index(case.severity), -case.birth.sure, case.step))
    telling = worst.telling(recording)
    evidence = telling.evidence() | {"recovered": worst.recovered, "births": births}
    message = telling.message()
    if worst.recovered:
        evidence["steps"] = steps = sum(case.moment.steps for case in same)
        often = f"It was so in {steps} steps from step {same[0].step} on, and the" if steps > 1 else "The"
        kept = all(_kept_away(case.moment, recording.of_kind(TOTAL)) for case in same)
        skipped = kept and worst.birth.how in BACKWARD
        evidence["skipped"] = skipped
        message = f"{message} {often} run went on{', as the optimizer never got these gradients' if skipped else ''}."
    return Finding(
        code=NanBorn.code,
        severity=worst.severity,
        site=worst.wiring.text(worst.birth.site),
        step=worst.step,
        message=message,
        evidence=evidence,
        confidence=worst.birth.sure if worst.glance is None else round(worst.birth.sure * AGAIN, 2),
        remedy=telling.remedy(),
    )
