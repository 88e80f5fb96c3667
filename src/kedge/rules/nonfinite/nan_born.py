"""NAN-BORN: the place where the first NaN or infinity was made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

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
from kedge.rules.nonfinite.births import Birth, with_end, with_kept_calls, with_producer
from kedge.rules.nonfinite.evidence import RowEvidence
from kedge.rules.nonfinite.search import Search, Sighting
from kedge.rules.nonfinite.wording import finding
from kedge.rules.recorded.wiring import Wiring, wire
from kedge.rules.rule import SEVERITIES, Finding, Lack, Rule, Severity
from kedge.store.recording import Recording

#: The share of the certainty about a step that holds for the guarded step before it.
_AGAIN = 0.8


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

        Again: on a CPU under Linux the lines of the first bad step run once more in a copy of the
        process, with every operation seen. One that made such numbers of finite ones, or a NaN of
        infinities that were put in place, made it; in the backward, the first node that passes on
        such gradients and got finite ones. It counts before what the graph of the loss shows, if
        every variable that ran again has its non-finite elements where the program's had them.

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
          were watched; a NaN that a module was given and that no module returned, while all
          gradients were finite: missing values that the module replaces, or memory of torch.empty
          that it does not use.
        - nothing: only infinities, while all gradients and all outputs of the model were finite; or
          some elements of the output were -inf, while all gradients were finite. Masks do this by
          design.

    Evidence:
        Where it was made (how) and how that is known (certainty): seen, inferred, among several,
        between two sites or steps, or unknown; the kind of value and the number of elements; the
        line of the program that calls the module, and the autograd node of the value; the range of
        the values next to it; other sites with non-finite values in the same step (propagators);
        modules with non-finite input and finite output (healed); other modules that may have made
        it (also); the records of a guarded step and of the step after it (guarded); a parameter
        that had grown a thousandfold (growth); and the last 16 recorded steps of the site and of
        its inputs (before), with rms, absmax and state. The severities follow those of msProbe for
        overflows: normal input with abnormal output is the critical case.

    Remedy:
        Each finding has the remedy for its own cause: an operation outside its domain, a product
        that overflows its dtype, an infinite derivative, a batch with missing values, a learning
        rate that is too large. If Kedge could search the autograd graph of the loss, the finding
        also names the operation and the line. kedge run --dump keeps the module's inputs, so that
        the call can be run again by itself.

    Cannot see:
        Which operation of a function between two modules made the value, where the step did not run
        again and the graph of the loss does not show it: then the finding lists those that may have. What is computed
        inside of compiled code, TorchScript or another process. On a device, the step itself if
        the program ended before the news arrived.
    """

    max_findings: int = 5

    code: ClassVar[str] = "NAN-BORN"
    name: ClassVar[str] = "a NaN or an infinity was made here"
    severity: ClassVar[Severity] = "error"
    ends_training: ClassVar[bool] = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Return one finding for every independent birth."""
        bad_steps = find_bad_steps(recording)
        births = _births(recording, bad_steps)[: self.max_findings]
        births = with_kept_calls(recording, bad_steps, births)
        births = with_producer(recording, bad_steps, births)
        births = with_end(recording, births)
        return [finding(recording, birth) for birth in births]

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of any recorded step; a single one can be judged."""
        recorded = any(len(recording.rows(site)) for site in recording.sites)
        if recorded:
            return None
        return Lack(self.code, "recorded step", 0, 1)

    def drawn(
        self,
        recording: Recording,  # noqa: ARG002 - the evidence says it
        finding: Finding,
    ) -> Sequence[str]:
        """Return the site, and those with finite values next to it."""
        evidence = finding.evidence
        if not isinstance(evidence, RowEvidence):
            return [finding.site]
        return [finding.site, *evidence.near]


def _births(recording: Recording, bad_steps: BadSteps) -> list[Birth]:
    """Return the independent births that the rows show, each once for all steps in which it was seen."""
    if not bad_steps.steps:
        return []
    wiring = wire(recording)
    groups: dict[object, list[Birth]] = {}
    for birth in _seen(wiring, bad_steps):
        key: object = (birth.place, birth.site)
        is_of_gradients = birth.sighting is not None and birth.sighting.is_of_gradients
        if birth.recovered and (birth.place == "backward" or is_of_gradients):
            # Between measured steps gradients have fewer sites, so the same birth may show at
            # another one.
            key = "backward"
        groups.setdefault(key, []).append(birth)

    found = []
    for same in groups.values():
        worst = min(same, key=_badness)
        kept_away = worst.place == "backward" and all(birth.kept_away for birth in same)
        found.append(
            replace(
                worst,
                times=sum(birth.times for birth in same),
                since=same[0].step,
                kept_away=kept_away,
                births=len(groups),
            )
        )
    return found


def _badness(birth: Birth) -> tuple[int, float, int]:
    sure = birth.sighting.sure if birth.sighting else birth.sure
    return SEVERITIES.index(birth.severity), -sure, birth.step


def _seen(wiring: Wiring, bad_steps: BadSteps) -> Iterator[Birth]:
    """Yield the births of each step until one from which the run never recovers: everything later follows from it."""
    recording = wiring.recording
    searches = []
    for raw in bad_steps.steps:
        bad_step = infer_states(excuse(raw, bad_steps.habitual), wiring)
        searches.append(Search(wiring, bad_step))

    for at, search in enumerate(searches):
        recovered = bad_steps.recovered(recording, search.bad_step)
        sightings = search.sightings()
        if search.shows_only_gradients():
            sightings = [_of_gradients(search, searches[at + 1 :])]
        for sighting in sightings:
            severity = _severity(recording, sighting, recovered)
            if severity is None:
                continue
            step, sure = sighting.bad_step.step, sighting.sure
            if sighting.shown_first is not None:
                step, sure = sighting.shown_first.step, round(sure * _AGAIN, 2)
            totals = [site.id for site in recording.of_kind(TOTAL)]
            yield Birth(
                place=sighting.place,
                certainty=sighting.certainty,
                site=wiring.text(sighting.site),
                step=step,
                severity=severity,
                recovered=recovered,
                sure=sure,
                sighting=sighting,
                times=sighting.bad_step.steps,
                kept_away=sighting.bad_step.are_finite(totals) is True,
            )
        if not recovered:
            return


def _of_gradients(search: Search, later: Iterable[Search]) -> Sighting:
    """Return the birth of a step with records of gradients alone, by the next step with more records if that shows it."""
    for other in later:
        if other.shows_only_gradients():
            continue
        if other.bad_step.last_sound > search.bad_step.step:
            break
        for sighting in other.sightings():
            if other.makes_again(sighting):
                return replace(sighting, shown_first=search.bad_step)
        return search.only_gradients(other.bad_step)
    return search.only_gradients(None)


def _severity(recording: Recording, sighting: Sighting, recovered: bool) -> Severity | None:
    """Return how bad a birth is; None if it is no fault, such as masked values."""
    place, bad_step = sighting.place, sighting.bad_step
    gradients, returned = judged(recording)
    gradient_sites = [site.id for site in gradients]
    if sighting.shown_first is not None:
        if recovered:
            return "warning"
        return "error"
    if place == "loss":
        # With finite gradients the optimizer has trained on such a loss, and nothing else of the
        # run shows it. Those of a pass whose step a scaler has skipped are known at the outputs
        # alone.
        outputs = [site.id for site in recording.of_kind("out.grad")]
        # Where none was recorded, as on a device, the optimizer may never have got them.
        has_trained = bad_step.are_finite([*gradient_sites, *outputs]) is True
        if recovered and not has_trained:
            return "warning"
        return "error"
    if place in ("written", "optimizer", "parameter", "unseen"):
        if recovered:
            return "warning"
        return "error"
    if place == "backward":
        is_half = any(site.dtype == "float16" for site in recording.sites)
        if recovered or (is_half and not _stepped(recording, bad_step)):
            if is_half:
                return "info"
            return "warning"
        return "error"

    if (bad_step.states == NAN).any():
        if not bad_step.sound:
            return "error"
        if sighting.went_no_further(recording):
            return "info"
        return "warning"
    if bad_step.sound:
        return None
    reached = bad_step.nonfinite([*gradient_sites, *(site.id for site in returned)])
    if not reached:
        return "info"
    is_trained = bad_step.are_finite(gradient_sites) is not None
    if is_trained or _above(recording, bad_step, reached):
        return "error"
    return "warning"


def _stepped(recording: Recording, bad_step: BadStep) -> bool:
    """Whether an optimizer stepped in a step: then its parameters are recorded before it does."""
    sites = (*recording.of_kind("param"), *recording.of_kind(TOTAL))
    return bad_step.are_finite(site.id for site in sites) is not None


def _above(recording: Recording, bad_step: BadStep, sites: Iterable[int]) -> bool:
    """Whether any of some sites holds more than a few -inf: +inf, or a bad loss."""
    for site in sites:
        info = recording.sites[site]
        rows = recording.rows(info)
        now = rows.step == bad_step.step
        if not info.shape or (rows.sum[now] != -np.inf).any() or (rows.max[now] == np.inf).any():
            return True
    return False
