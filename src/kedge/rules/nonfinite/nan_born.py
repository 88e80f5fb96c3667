"""NAN-BORN: the place where the first NaN or infinity was made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kedge.rules.nonfinite.at_the_end import with_end
from kedge.rules.nonfinite.bad_steps import (
    NAN,
    TOTAL,
    BadStep,
    BadSteps,
    excuse,
    find_bad_steps,
    infer_states,
    judged,
)
from kedge.rules.nonfinite.from_repro import with_kept_calls
from kedge.rules.nonfinite.producer import with_producer
from kedge.rules.nonfinite.search.births import (
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
from kedge.rules.nonfinite.search.gradient_only_steps import (
    AGAIN,
    gradient_only_birth,
    makes_again,
    shows_only_gradients,
)
from kedge.rules.nonfinite.wording.birth_in_step import BirthInStep
from kedge.rules.nonfinite.wording.birth_wording import BirthWording
from kedge.rules.nonfinite.wording.gradient_only_wording import GradientOnlyWording
from kedge.rules.recorded.wiring import Wiring, wire
from kedge.rules.rule import SEVERITIES, Finding, Lack, Rule, Severity
from kedge.store.recording import Recording, SiteInfo

#: Births between a backward and the next forward, and in parameters.
OPTIMIZER = ("parameter", "stepped", "unseen", "update", "within", "written")


@dataclass(frozen=True)
class NanBorn(Rule):
    """A NaN or an infinity was made from finite numbers.

    Meaning:
        A NaN spreads: within a few operations nearly every output and gradient contains one, and
        after the next optimizer step every parameter does. This rule names the place where the
        first one was made, not the sites that only passed it on.

    Formula:
        Inputs and parameters finite, output not finite: the module made it. Input and output not
        finite: the module passed it on. Input not finite, output finite: the module healed it, for
        example with a mask or nan_to_num.

        Forward: a site is a birth if its output is not finite, its inputs and its own parameters
        are finite, and no module inside it explains the value. If a module's input is not finite
        although the outputs that it came from were, the birth lies between them, in the forward of
        the module that contains both.

        Backward: the non-finite gradient nearest to the loss counts. The module that uses this
        output made it if the gradient that arrived at that module was finite; the loss made it if
        no module uses the output. If several modules use it, or an operation in a container's own
        forward may, the finding names all of them, except linear maps whose numbers are too small
        to overflow. If a parameter's gradient is not finite but the gradient of its module's output
        is, that module's backward made it.

        At the end: all trained parameters, and the buffers of their models, are read once. One that
        is not finite, and that no birth explains, is a finding with the last step in which it was
        recorded finite.

        Elsewhere: if all gradients were finite after backward, but not when the optimizer got them,
        the program changed them in between. If a parameter is not finite and was finite before, the
        optimizer's step made it. If the loss is not finite and all outputs are, the program's own
        operations after the model made it. A linear map whose numbers are too small to overflow
        made nothing: its input came from another place than in other steps, or its parameters
        changed between two calls.

    Window:
        Every step with a non-finite value, including guarded steps, which record only norms, and
        only those of the parameters' gradients. Nothing is reported after a step from which the run
        never recovers: everything later follows from it. Steps without records are reported as
        such. If a guarded step recorded only gradients of parameters, and its loss was finite, the
        message gives the two parameters between which its backward made the value. If the loss is
        not known, it gives the two steps between which the value was made, and names a module only
        if the next recorded step shows that module making a non-finite value from finite inputs and
        parameters.

    Thresholds:
        - max_findings (5): the most independent births that are reported. Usually there is one; the
          limit only keeps a broken recording from filling the screen.

    Severity:
        - error: a NaN, or an infinity that reached a gradient, the loss or the model's output; a
          loss that was not finite while its gradients were, in any step; a parameter that is not
          finite at the end.
        - warning: a NaN that a later operation replaced by finite values; -inf in the output of a
          model that is not trained; non-finite gradients or updates in a step from which the run
          recovered.
        - info: such gradients in a float16 run, where loss scaling skips the step on purpose and
          the optimizer never gets them; an infinity if neither gradients nor the model's output
          were watched.
        - nothing: only infinities, while all gradients and all outputs of the model were finite; or
          some elements of the output were -inf, while all gradients were finite. Masks do this by
          design.

    Evidence:
        The kind of value and the number of elements; the line of the program that calls the module,
        and the autograd node of the value; the range of the values next to it; other sites with
        non-finite values in the same step (propagators); modules with non-finite input and finite
        output (healed); other modules that may have made it (also); the records of a guarded step
        and of the step after it (guarded); a parameter that had grown a thousandfold (growth); and
        the last 16 recorded steps of the site and of its inputs (before), with rms, absmax and
        state. The severities follow those of msProbe for overflows: normal input with abnormal
        output is the critical case.

    Remedy:
        Each finding has the remedy for its own cause: an operation outside its domain, a product
        that overflows its dtype, an infinite derivative, a batch with missing values, a learning
        rate that is too large. If Kedge could search the autograd graph of the loss, the finding
        also names the operation and the line. kedge run --dump keeps the module's inputs, so that
        the call can be run again by itself.
    """

    max_findings: int = 5

    code: ClassVar[str] = "NAN-BORN"
    name: ClassVar[str] = "a NaN or an infinity was made here"
    severity: ClassVar[Severity] = "error"
    ends_training: ClassVar[bool] = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Return one finding for every independent birth."""
        bad_steps = find_bad_steps(recording)
        cases: dict[tuple[str, int], list[_Case]] = {}
        if bad_steps.steps:
            for case in _cases(recording, wire(recording), bad_steps):
                cases.setdefault(case.kind, []).append(case)
        found = [
            _finding(recording, same, len(cases))
            for same in list(cases.values())[: self.max_findings]
        ]
        found = with_kept_calls(recording, bad_steps, found)
        found = with_producer(recording, bad_steps, found)
        return with_end(recording, found)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of any recorded step; a single one can be judged."""
        recorded = any(len(recording.rows(site)) for site in recording.sites)
        return None if recorded else Lack(self.code, "recorded step", 0, 1)


@dataclass(frozen=True)
class _Case:
    """One birth in one step.

    If it showed first in a guarded step before this one, ``shown_first`` is that step. If this one
    is a guarded step, ``later`` is the next step with more records.
    """

    wiring: Wiring
    bad_step: BadStep
    birth: Birth
    severity: Severity
    recovered: bool
    later: BadStep | None = None
    shown_first: BadStep | None = None

    @property
    def kind(self) -> tuple[str, int]:
        """The key that it shares with the same birth in another step.

        Between measured steps gradients have fewer sites, so the same birth may show at another
        one.
        """
        skipped = self.recovered and self.birth.how in (*BACKWARD, "guarded")
        return ("backward", -1) if skipped else (self.birth.how, self.birth.site)

    @property
    def step(self) -> int:
        """The first step in which it showed."""
        return self.bad_step.step if self.shown_first is None else self.shown_first.step

    def wording(self, recording: Recording) -> BirthWording | GradientOnlyWording:
        """Return the words for it."""
        words = BirthWording(BirthInStep(recording, self.wiring, self.bad_step, self.birth))
        if self.birth.how == "guarded" or self.shown_first is not None:
            return GradientOnlyWording(words, self.shown_first or self.bad_step, self.later)
        return words


def _cases(recording: Recording, wiring: Wiring, bad_steps: BadSteps) -> Iterator[_Case]:
    def known(start: int) -> Iterator[BadStep]:
        return (
            infer_states(excuse(raw, bad_steps.habitual), wiring) for raw in bad_steps.steps[start:]
        )

    returned = judged(recording)[1]
    for at, bad_step in enumerate(known(0)):
        recovered = bad_steps.recovered(recording, bad_step)
        if shows_only_gradients(wiring, bad_step):
            yield from _gradient_only(wiring, bad_step, known(at + 1), recovered)
        else:
            for birth in _births(wiring, bad_step, returned):
                severity = _severity(recording, bad_step, birth, recovered)
                if severity:
                    yield _Case(wiring, bad_step, birth, severity, recovered)
        if not recovered:
            return


def _gradient_only(
    wiring: Wiring, bad_step: BadStep, others: Iterable[BadStep], recovered: bool
) -> Iterator[_Case]:
    """Yield the birth of a step with records of gradients alone, by the next step with more records if that shows it."""
    severity: Severity = "warning" if recovered else "error"
    later = next((m for m in others if not shows_only_gradients(wiring, m)), None)
    if later is None or later.last_sound > bad_step.step:
        later = None
    else:
        for birth in _births(wiring, later, judged(wiring.recording)[1]):
            if makes_again(wiring, later, birth):
                yield _Case(wiring, later, birth, severity, recovered, shown_first=bad_step)
                return
    yield _Case(
        wiring, bad_step, gradient_only_birth(wiring, bad_step), severity, recovered, later=later
    )


def _births(wiring: Wiring, bad_step: BadStep, returned: Iterable[SiteInfo]) -> list[Birth]:
    """Return the births of one step: forward, backward, in the optimizer, in this order."""
    forward = forward_births(wiring, bad_step)
    if not forward and (lost := loss_birth(wiring, bad_step)):
        return [lost]
    backward = None
    if not bad_step.bad_params and not bad_step.nonfinite(site.id for site in returned):
        backward = backward_birth(wiring, bad_step)
    if backward:
        causes = [birth for birth in forward if explains(wiring, bad_step, birth, backward)]
        return causes or [backward]
    if forward:
        return forward
    other = (
        written_birth(wiring, bad_step)
        or parameter_birth(wiring, bad_step)
        or update_birth(wiring, bad_step)
    )
    return [other] if other else []


def _severity(
    recording: Recording, bad_step: BadStep, birth: Birth, recovered: bool
) -> Severity | None:
    if birth.how == "made":
        # With finite gradients the optimizer has trained on such a loss, and nothing else of the
        # run shows it. Those of a pass whose step a scaler has skipped are known at the outputs
        # alone.
        backward = (*judged(recording)[0], *recording.of_kind("out.grad"))
        spoiled = bad_step.are_finite(site.id for site in backward) is False
        return "warning" if recovered and spoiled else "error"
    if birth.how in OPTIMIZER:
        return "warning" if recovered else "error"
    if birth.how in BACKWARD:
        half = any(site.dtype == "float16" for site in recording.sites)
        harmless = recovered or (half and not _stepped(recording, bad_step))
        return "error" if not harmless else "info" if half else "warning"
    if (bad_step.states == NAN).any():
        return "warning" if bad_step.sound else "error"
    if bad_step.sound:
        return None
    gradients, returned = judged(recording)
    reached = bad_step.nonfinite(site.id for site in (*gradients, *returned))
    if not reached:
        return "info"
    trained = bad_step.are_finite(site.id for site in gradients) is not None
    return "error" if trained or _above(recording, bad_step, reached) else "warning"


def _stepped(recording: Recording, bad_step: BadStep) -> bool:
    """Whether an optimizer stepped in a step: then its parameters are recorded before it does."""
    known = bad_step.are_finite(
        site.id for kind in ("param", TOTAL) for site in recording.of_kind(kind)
    )
    return known is not None


def _kept_away(bad_step: BadStep, totals: Iterable[SiteInfo]) -> bool:
    """Whether the optimizer never got the non-finite gradients: those that it got were finite."""
    return bad_step.are_finite(site.id for site in totals) is True


def _above(recording: Recording, bad_step: BadStep, sites: Iterable[int]) -> bool:
    """Whether any of some sites holds more than a few -inf: +inf, or a bad loss."""
    for site in sites:
        info, rows = recording.sites[site], recording.rows(recording.sites[site])
        now = rows.step == bad_step.step
        if not info.shape or (rows.sum[now] != -np.inf).any() or (rows.max[now] == np.inf).any():
            return True
    return False


def _finding(recording: Recording, same: list[_Case], births: int) -> Finding:
    worst = min(
        same, key=lambda case: (SEVERITIES.index(case.severity), -case.birth.sure, case.step)
    )
    wording = worst.wording(recording)
    evidence = wording.evidence() | {"recovered": worst.recovered, "births": births}
    message = wording.message()
    if worst.recovered:
        evidence["steps"] = steps = sum(case.bad_step.steps for case in same)
        often = (
            f"This happened in {steps} steps from step {same[0].step} on, and the"
            if steps > 1
            else "The"
        )
        kept = all(_kept_away(case.bad_step, recording.of_kind(TOTAL)) for case in same)
        skipped = kept and worst.birth.how in BACKWARD
        evidence["skipped"] = skipped
        message = f"{message} {often} run went on{', because the optimizer never got these gradients' if skipped else ''}."
    return Finding(
        code=NanBorn.code,
        severity=worst.severity,
        site=worst.wiring.text(worst.birth.site),
        step=worst.step,
        message=message,
        evidence=evidence,
        confidence=worst.birth.sure
        if worst.shown_first is None
        else round(worst.birth.sure * AGAIN, 2),
        remedy=wording.remedy(),
    )
