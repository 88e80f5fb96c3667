"""EVAL-APART: outputs of evaluation that are far larger than those of training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.rules.evidence import Evidence, said
from kedge.rules.naming import NAMED
from kedge.rules.recorded.course import Course
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.roots import names_of
from kedge.rules.recorded.trained import steps_of_training
from kedge.rules.rule import Finding, Rule, Severity
from kedge.short_text import listed
from kedge.store.events import EvaluatedOutputsEvent, OutputSize
from kedge.store.recording import Recording

_NEAR = 5
"""Measured steps around an evaluation whose outputs it is compared with."""


@dataclass(frozen=True, kw_only=True)
class EvalApartEvidence(Evidence):
    """The outputs of an evaluation, those of training, and what estimates in training."""

    evaluated: float = said("rms {} in evaluation")
    trained: float = said("rms {} in training")
    evaluations: int = said("{} evaluations")
    estimates: Sequence[str] = said("modules {}")


@dataclass(frozen=True)
class EvalApart(Rule):
    """In evaluation mode the outputs are far larger than in training.

    Meaning:
        Some modules compute in evaluation with what they estimated in training: batch norms with
        the running mean and variance, spectral norms with an estimate of the largest singular
        value. Before the first steps of training these estimates are those of the initialization,
        and what is evaluated then says nothing about the model. Later they are wrong if they were
        hardly updated (a momentum near zero, batch norms in evaluation mode) or follow other data.

    Formula:
        The rms of the output in an evaluation is above times x the median of the nearest measured
        steps of training, and the model has modules that estimate. A warning if that is so in the
        last evaluation, after at least min_steps steps of training; info for evaluations before the
        first step.

    Window:
        The first output of up to 20 evaluations, two of them before the training.

    Thresholds:
        - times (30): how much larger outputs are.
        - min_steps (20): steps of training in which estimates have settled.

    Evidence:
        Both sizes, and the modules that estimate.

    Remedy:
        Evaluate after some steps of training. Later: look at the momentum of the batch norms, and
        whether they are in training mode while the model is trained.

    Cannot see:
        Outputs that are wrong and of usual size; evaluations of another copy of the model, or
        under torch.compile.
    """

    times: float = 30.0
    min_steps: int = 20

    code = "EVAL-APART"
    name = "outputs are far larger in evaluation than in training"
    severity = "warning"
    of_training = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        for event in events_of(recording, EvaluatedOutputsEvent):
            steps = steps_of_training(recording, event.root)
            if not event.estimates or not len(steps):
                continue
            first = int(steps[0])
            settled = [each for each in event.sizes if each.step >= first + self.min_steps]
            early = [each for each in event.sizes if each.step <= first]
            last = settled[-1:]
            if any(self._is_apart(recording, event, each) for each in last):
                yield self._finding(recording, event, last[0], len(settled), "warning")
            elif early and self._is_apart(recording, event, early[0]):
                yield self._finding(recording, event, early[0], len(early), "info")

    def idle(self, recording: Recording) -> str:
        """Return that the program evaluated no model that estimates anything."""
        events = recording.of(EvaluatedOutputsEvent)
        if not any(event.estimates for event in events):
            return "no evaluation of a model with batch or spectral norms"
        return ""

    def _is_apart(
        self, recording: Recording, event: EvaluatedOutputsEvent, size: OutputSize
    ) -> bool:
        trained = _trained(recording, event.root, size)
        return 0 < trained * self.times < size.rms

    def _finding(
        self,
        recording: Recording,
        event: EvaluatedOutputsEvent,
        size: OutputSize,
        evaluations: int,
        severity: Severity,
    ) -> Finding:
        model = names_of(recording, [event.root])
        trained = _trained(recording, event.root, size)
        modules = listed(list(event.estimates), 3)
        when = f"at step {size.step}"
        remedy = (
            "Look at the momentum of the batch norms, and whether they are in training mode while "
            "the model is trained. Nothing is wrong if the model undoes a scaling in evaluation."
        )
        if severity == "info":
            when = "before its first step of training"
            remedy = "Evaluate after some steps of training: what this evaluation says is no measure of the model."
        return Finding(
            code=self.code,
            severity=severity,
            site=size.site,
            step=size.step,
            message=f"{model} was evaluated {when}, and its output ({size.site}) had an rms of {size.rms:.3g}, where "
            f"the nearest measured steps of training have {trained:.3g}. It computes in evaluation "
            f"with what was estimated in training, at {modules}.",
            evidence=EvalApartEvidence(
                evaluated=size.rms,
                trained=trained,
                evaluations=evaluations,
                estimates=list(event.estimates[:NAMED]),
            ),
            confidence=0.8,
            remedy=remedy,
        )


def _trained(recording: Recording, root: int, size: OutputSize) -> float:
    """Return the median size of an output in the measured steps nearest to an evaluation; 0 if unknown."""
    site = next((each for each in recording.of_kind("out") if each.site == size.site), None)
    if site is None:
        return 0.0
    course = Course.of(recording, site, "rms")
    course = course.where(np.isin(course.steps, steps_of_training(recording, root)))
    if not len(course):
        return 0.0
    nearest = np.argsort(np.abs(course.steps - size.step), kind="stable")[:_NEAR]
    return float(np.median(course.values[nearest]))
