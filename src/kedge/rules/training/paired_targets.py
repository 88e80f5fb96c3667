"""PAIRED-TARGETS: losses in which broadcasting compares each prediction with each target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kedge.frames import SourceLine
from kedge.rules.evidence import said, unsaid
from kedge.rules.recorded.loss_graph import LossEvidence, line_of_result, place_of
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.samples import no_loss_graph
from kedge.rules.rule import Finding, Lack, Rule
from kedge.store.events import Broadcast, LossGraphEvent
from kedge.store.recording import Recording


@dataclass(frozen=True, kw_only=True)
class PairedTargetsEvidence(LossEvidence):
    """The operation that spread the predictions, the shapes, and the line that calls backward."""

    by: str = said("by {}")
    shape: Sequence[int] = said("from shape {}")
    to: Sequence[int] = said("to {}")
    source: SourceLine | None = unsaid()


@dataclass(frozen=True)
class PairedTargets(Rule):
    """Broadcasting compares each prediction with each target, and not with its own.

    Meaning:
        Predictions of shape (N, 1) and targets of shape (N,), or the reverse, are broadcast to N by
        N pairs. The best that a model can do is then to predict the mean of all targets, whatever
        its input is; the loss falls until it does. Probabilities of actions that are weighed by
        rewards get the mean reward in the same way.

    Formula:
        By the autograd graph of the loss: a difference, or PyTorch's mse_loss, l1_loss,
        smooth_l1_loss or huber_loss, has a result of shape (N, N) and one operand with a gradient,
        of shape (N, 1) or (N,), which a layer, an activation, a slice, a view or a squeeze made. Or
        a product has, of an operand that gather, a logarithm, an exponential or a sum made.

    Window:
        The first measured step of each line that calls backward.

    Thresholds:
        - least (4): predictions in the batch. The shape of fewer may be a square by chance.

    Evidence:
        The operation, the shape of the predictions and that of the result, its line, as far as it
        is known, and the line that calls backward.

    Remedy:
        Give both the same shape: target.unsqueeze(1), or prediction.squeeze(1).

    Cannot see:
        Shapes of more dimensions, such as (N, 1, L) beside (N, L); a loss that is a
        torch.autograd.Function.
    """

    least: int = 4

    code = "PAIRED-TARGETS"
    name = "each prediction is compared with each target"
    severity = "warning"
    of_training = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every line that calls backward."""
        for event in events_of(recording, LossGraphEvent):
            if event.broadcast is not None and event.broadcast.to[0] >= self.least:
                yield self._finding(recording, event, event.broadcast)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of a recorded graph of the loss; without training there is none."""
        return no_loss_graph(self.code, recording)

    def _finding(
        self, recording: Recording, event: LossGraphEvent, broadcast: Broadcast
    ) -> Finding:
        place = place_of(recording, event)
        number = broadcast.to[0]
        return Finding(
            code=self.code,
            severity=self.severity,
            site=event.site,
            step=place.step,
            message=f"The loss ({place.name}) compares each of {number} predictions with "
            f"each of {number} targets or weights: those of shape {broadcast.shape} were broadcast to "
            f"{broadcast.to}.",
            evidence=PairedTargetsEvidence(
                by=broadcast.by,
                shape=broadcast.shape,
                to=broadcast.to,
                source=place.source,
                made_at=line_of_result(recording, event, broadcast.by, broadcast.to),
            ),
            confidence=0.9,
            remedy="Give both the same shape: target.unsqueeze(1), or prediction.squeeze(1).",
        )
