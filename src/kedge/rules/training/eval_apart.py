"""EVAL-APART: evaluation with estimates that do not fit the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kedge.rules.evidence import Evidence, said
from kedge.rules.naming import NAMED
from kedge.rules.recorded.evaluated import size_in_training
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.roots import names_of
from kedge.rules.recorded.trained import steps_of_training, trained_roots
from kedge.rules.rule import Finding, Rule, Severity
from kedge.short_text import listed
from kedge.store.events import EvaluatedOutputsEvent, ModesEvent, OutputSize
from kedge.store.recording import Recording


@dataclass(frozen=True, kw_only=True)
class EvalApartEvidence(Evidence):
    """The outputs of an evaluation, those of training, and what estimates in training."""

    evaluated: float = said("rms {} in evaluation")
    trained: float = said("rms {} in training")
    evaluations: int = said("{} evaluations")
    estimates: Sequence[str] = said("modules {}")


@dataclass(frozen=True, kw_only=True)
class NeverUpdatedEvidence(Evidence):
    """The modules whose running statistics were never updated, and the model that was trained.

    Attributes:
        copy_of: The trained model, if another one was evaluated.
    """

    modules: Sequence[str] = said("modules {}")
    of: int = said("of {} with running statistics")
    evaluated: int = said("evaluated at step {}")
    copy_of: str = said("a copy of {}", unless="")


@dataclass(frozen=True)
class EvalApart(Rule):
    """In evaluation mode the outputs are far larger than in training, or statistics were never updated.

    Meaning:
        Some modules compute in evaluation with what they estimated in training: batch norms with
        the running mean and variance, spectral norms with an estimate of the largest singular
        value. Before the first steps of training these estimates are those of the initialization,
        and what is evaluated then says nothing about the model. Later they are wrong if they were
        never or hardly updated (a momentum of zero, a copy of the model that got the parameters and
        not the buffers, batch norms in evaluation mode) or follow other data.

    Formula:
        The rms of the output in an evaluation is above times x the median of the nearest measured
        steps of training, and the model has modules that estimate. A warning if that is so in the
        last evaluation, after at least min_steps steps of training; info for evaluations before the
        first step.

        Or: in the last evaluation, after at least min_steps steps of training, modules have a
        running mean of exactly 0 and a variance of exactly 1. A warning for modules that were in
        training mode when the model was trained; and for a model that no optimizer trains, if a
        trained one has the same modules, and none of its statistics were updated but those of the
        other were.

    Window:
        The first output of up to 20 evaluations, two of them before the training. Of a model that
        is not trained, evaluations that are ever farther apart.

    Thresholds:
        - times (30): how much larger outputs are.
        - min_steps (20): steps of training in which estimates have settled.

    Evidence:
        Both sizes, and the modules that estimate; or the modules that were never updated.

    Remedy:
        Evaluate after some steps of training. Later: look at the momentum of the batch norms, and
        whether they are in training mode while the model is trained. Copy buffers with the
        parameters, as torch.optim.swa_utils.AveragedModel does, or estimate them for the copy
        (update_bn there).

    Cannot see:
        Outputs that are wrong and of usual size, if the statistics were updated at all; evaluations
        under torch.compile.
    """

    times: float = 30.0
    min_steps: int = 20

    code = "EVAL-APART"
    name = "evaluation computes with estimates that do not fit the model"
    severity = "warning"
    of_training = True
    follows = "EVAL-MODE"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        for event in events_of(recording, EvaluatedOutputsEvent):
            never_updated = self._never_updated(recording, event)
            if never_updated is not None:
                yield never_updated
                continue
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

    def _never_updated(self, recording: Recording, event: EvaluatedOutputsEvent) -> Finding | None:
        """Return the finding on running statistics that are those of the initialization."""
        trained = event.root
        modules = [path for path in event.initial if path in _trained_modules(recording, trained)]
        if trained not in trained_roots(recording):
            modules = list(event.initial)
            trained = _original(recording, event)
        steps = steps_of_training(recording, trained)
        last = event.sizes[-1]
        if not modules or trained < 0 or not len(steps) or last.step < steps[0] + self.min_steps:
            return None

        model = names_of(recording, [event.root])
        copy_of = ""
        verb, pronoun = "has", "it was"
        if len(modules) > 1:
            verb, pronoun = "have", "they were"
        why = f"though {pronoun} in training mode while the model was trained."
        remedy = (
            "Look at the momentum of these modules, which keeps the statistics if it is 0; at calls "
            "of reset_running_stats; and whether the program trains with copies of the buffers, as "
            "torch.func.functional_call does."
        )
        if trained != event.root:
            copy_of = names_of(recording, [trained])
            model = f"{model}, a copy of {copy_of} that no optimizer trains,"
            why = f"though those of {copy_of} were updated in training."
            remedy = (
                "Copy the buffers with the parameters, as torch.optim.swa_utils.AveragedModel does, "
                "or call torch.optim.swa_utils.update_bn before the evaluation."
            )
        return Finding(
            code=self.code,
            severity="warning",
            site=last.site,
            step=last.step,
            message=f"{model} was evaluated at step {last.step} with running statistics that were "
            f"never updated: {listed(modules, 3)} {verb} a mean of 0 and a variance of 1, {why}",
            evidence=NeverUpdatedEvidence(
                modules=modules[:NAMED],
                of=len(event.estimates),
                evaluated=last.step,
                copy_of=copy_of,
            ),
            confidence=0.9,
            remedy=remedy,
        )

    def _is_apart(
        self, recording: Recording, event: EvaluatedOutputsEvent, size: OutputSize
    ) -> bool:
        trained = size_in_training(recording, event.root, size)
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
        trained = size_in_training(recording, event.root, size)
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


def _trained_modules(recording: Recording, root: int) -> set[str]:
    """Return the modules of a root that ran and were in training mode when it was trained."""
    modes = [event for event in events_of(recording, ModesEvent) if event.root == root]
    ran = {site.owner for site in recording.of_kind("out") if len(recording.rows(site))}
    return {path for event in modes for path in event.train if path in ran}


def _original(recording: Recording, event: EvaluatedOutputsEvent) -> int:
    """Return the trained root of which another one is a copy, if all statistics of the copy alone are initial; else -1."""
    if event.root >= len(recording.roots) or set(event.initial) != set(event.estimates):
        return -1
    types = _types(recording, event.root)
    initial = {each.root for each in events_of(recording, EvaluatedOutputsEvent) if each.initial}
    for root in sorted(trained_roots(recording) - initial):
        own = _types(recording, root)
        if own and types[-len(own) :] == own and _trained_modules(recording, root):
            return root
    return -1


def _types(recording: Recording, root: int) -> list[str]:
    """Return the classes of a root's modules, in order."""
    if root >= len(recording.roots):
        return []
    return [str(module.get("type")) for module in recording.roots[root].modules]
