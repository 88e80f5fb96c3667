"""TRAIN-MODE: evaluation with what is meant for training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kedge.rules.evidence import Evidence, said
from kedge.rules.naming import NAMED
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.roots import names_of, root_path
from kedge.rules.rule import Finding, Rule
from kedge.short_text import counted, listed
from kedge.store.events import ActiveDropout, EvaluationEvent
from kedge.store.recording import Recording


@dataclass(frozen=True, kw_only=True)
class TrainModeEvidence(Evidence):
    """The modules that worked as in training, and the passes in which they did."""

    modules: Sequence[str] = said("modules {}")
    passes: int = said("{} passes")
    of: int = said("of {} passes of evaluation")
    since: int = said("since step {}")


@dataclass(frozen=True, kw_only=True)
class ActiveDropoutEvidence(Evidence):
    """The calls of dropout that were active in evaluation mode."""

    calls: Sequence[str] = said("at {}")
    share: float = said("each drops {}")
    passes: int = said("{} passes of evaluation")


@dataclass(frozen=True)
class TrainMode(Rule):
    """The model is evaluated with dropout, or with the statistics of the batch.

    Meaning:
        eval() was not called before the evaluation, or the forward calls dropout itself and does
        not tell it that there is no training. The outputs are worse than the model's and differ from
        call to call; batch normalisation also takes the evaluated samples into its running
        statistics.

    Formula:
        Forward passes of a trained model without gradients, at least three in a row while no model
        has a pass with gradients, in which dropout or batch normalisation worked as in training, in
        at least share of all such passes. Or, in evaluation mode, a call of
        torch.nn.functional.dropout with training=True, or of scaled_dot_product_attention with a
        dropout_p above zero.

    Window:
        The whole run. Calls of dropout are looked at in two passes of evaluation.

    Thresholds:
        - min_passes (6): a few passes without gradients may be a trial, or calibrate a model.
        - share (0.5): of the passes of evaluation.

    Evidence:
        The modules and the number of passes; or the lines that call dropout.

    Remedy:
        Call model.eval() before the evaluation, and model.train() after it. In a forward, write
        F.dropout(x, p, training=self.training), and dropout_p=p if self.training else 0.0. Dropout
        that is left on to sample outputs on purpose needs no change.

    Cannot see:
        An evaluation whose passes have gradients, or that calls a copy of the model; dropout in
        compiled code; other randomness in a forward.
    """

    min_passes: int = 6
    share: float = 0.5

    code = "TRAIN-MODE"
    name = "the model is evaluated as in training"
    severity = "warning"
    of_training = True
    follows = "NOT-OPTIMIZED:outside"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding of each kind for every root."""
        for event in events_of(recording, EvaluationEvent):
            is_usual = event.as_training >= self.share * event.passes
            if event.as_training >= self.min_passes and is_usual:
                yield self._as_training(recording, event)
            if event.dropout:
                yield self._dropout(recording, event, event.dropout)

    def idle(self, recording: Recording) -> str:
        """Return that the program evaluated no trained model."""
        if not recording.of(EvaluationEvent):
            return "no evaluation"
        return ""

    def _as_training(self, recording: Recording, event: EvaluationEvent) -> Finding:
        model = names_of(recording, [event.root])
        site = f"{root_path(recording, event.root)}:out"
        return Finding(
            code=self.code,
            severity=self.severity,
            site=site,
            step=event.step,
            message=f"{model} ({site}) is evaluated in training mode: in "
            f"{event.as_training:,} of {event.passes:,} forward passes in a row without gradients, "
            f"from step {event.step} on, {listed(list(event.train), 3)} worked as in training.",
            evidence=TrainModeEvidence(
                modules=list(event.train[:NAMED]),
                passes=event.as_training,
                of=event.passes,
                since=event.step,
            ),
            confidence=0.9,
            remedy="Call model.eval() before the evaluation, and model.train() after it.",
        )

    def _dropout(
        self, recording: Recording, event: EvaluationEvent, calls: Sequence[ActiveDropout]
    ) -> Finding:
        model = names_of(recording, [event.root])
        first = calls[0]
        path = root_path(recording, event.root)
        if first.module is not None:
            path = first.module
        others = ""
        if len(calls) > 1:
            others = f" and {counted(len(calls) - 1, 'more line')}"
        what = f"{first.function} drops {first.share:.0%}"
        remedy = (
            "Write F.dropout(x, p, training=self.training): without it dropout is always active."
        )
        if first.function == "scaled_dot_product_attention":
            remedy = (
                "Write dropout_p=p if self.training else 0.0: attention does not know the mode."
            )
        return Finding(
            code=self.code,
            severity=self.severity,
            site=f"{path}:out",
            step=event.step,
            message=f"Dropout is active while {model} is evaluated in evaluation mode: {what} at "
            f"{_line(first)}{others}, so its outputs differ from call to call.",
            evidence=ActiveDropoutEvidence(
                calls=[_line(call) for call in calls[:NAMED]],
                share=first.share,
                passes=event.passes,
            ),
            confidence=0.9,
            remedy=remedy,
        )


def _line(call: ActiveDropout) -> str:
    """Return where a call stands, with its text."""
    place = f"{call.file}:{call.line}"
    if call.text:
        return f"{place} ({call.text})"
    return place
