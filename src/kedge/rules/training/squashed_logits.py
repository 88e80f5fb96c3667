"""SQUASHED-LOGITS: losses of logits that come straight from an activation, by the loss's autograd graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kedge.frames import SourceLine
from kedge.rules.evidence import said, unsaid
from kedge.rules.recorded.loss_graph import (
    LossEvidence,
    computing,
    line_at,
    operations,
    place_of,
)
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.samples import no_loss_graph
from kedge.rules.rule import Finding, Lack, Rule
from kedge.store.events import LossGraphEvent
from kedge.store.recording import Recording

_RANGES = {"relu": (0.0, math.inf), "tanh": (-1.0, 1.0)}
"""The lowest and the highest value of each activation."""

_LOSSES = {
    "log_softmax": "cross_entropy",
    "binary_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
}
"""The losses of logits, by the operation that takes them."""


@dataclass(frozen=True, kw_only=True)
class SquashedLogitsEvidence(LossEvidence):
    """The operations from the loss backwards, and the line that calls backward."""

    operations: Sequence[str] = said("operations {}")
    source: SourceLine | None = unsaid()


@dataclass(frozen=True)
class SquashedLogits(Rule):
    """The logits come straight from an activation, which bounds them.

    Meaning:
        Logits may be any number: softmax and sigmoid make probabilities of them. After a ReLU none
        is below zero: a sigmoid of them is never below 0.5, and a class whose logit is zero gets no
        gradient by which it could come back. After a tanh they lie between -1 and 1: of ten
        classes, none is ever more probable than 0.45, and cross_entropy stays above 0.8.

    Formula:
        The autograd nodes from the loss backwards, without those that only change the shape or the
        dtype. Reported is relu or tanh right before the log_softmax of cross_entropy, or right
        before binary_cross_entropy_with_logits. With classes c and logits between -1 and 1, the
        largest probability is 1 / (1 + (c - 1) exp(-2)). A divergence of two distributions is left
        alone, as where a student's features after a ReLU are compared with a teacher's.

    Window:
        The first measured step of each line that calls backward.

    Thresholds:
        - shown (6): the number of nodes of the graph that the evidence lists. The rule has no other
          threshold: the graph decides.

    Evidence:
        The operations from the loss backwards, the line of the activation, as far as it is known,
        and the line that calls backward.

    Remedy:
        Leave out the activation after the last linear layer.

    Cannot see:
        An activation that is written by hand or scaled afterwards, as where logits are capped on
        purpose; pooling or dropout between it and the loss; the last activation of a model that
        predicts numbers, whose targets may fit it.
    """

    shown: int = 6

    code = "SQUASHED-LOGITS"
    name = "logits that an activation bounds"
    severity = "warning"
    of_training = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every line that calls backward."""
        for event in events_of(recording, LossGraphEvent):
            names = operations(event)
            chain = computing(names)
            for at, (taker, maker) in enumerate(pairwise(chain)):
                if taker in _LOSSES and maker in _RANGES and not _compares(chain[:at]):
                    yield self._finding(recording, event, names, taker, maker)
                    break

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of a recorded graph of the loss; without training there is none."""
        return no_loss_graph(self.code, recording)

    def _finding(
        self,
        recording: Recording,
        event: LossGraphEvent,
        names: Sequence[str],
        taker: str,
        maker: str,
    ) -> Finding:
        place = place_of(recording, event)
        lowest, highest = _RANGES[maker]
        bounds = f"none is below {lowest:g}"
        if math.isfinite(highest):
            bounds = f"all lie between {lowest:g} and {highest:g}"
        return Finding(
            code=self.code,
            severity=self.severity,
            site=event.site,
            step=place.step,
            message=f"The logits of the loss ({place.name}), which is {_LOSSES[taker]}, come "
            f"straight from {maker}: {bounds}.",
            evidence=SquashedLogitsEvidence(
                operations=names[: self.shown],
                source=place.source,
                made_at=line_at(recording, event, names.index(maker)),
            ),
            confidence=0.9,
            remedy=f"Leave out the {maker} after the last linear layer.",
        )


def _compares(behind: Sequence[str]) -> bool:
    """Whether what takes a log_softmax is no cross_entropy, but a divergence or an entropy.

    These take the difference of two logarithms, or make probabilities of them again.
    """
    last = behind[-1:]
    return last in (["sub"], ["exp"]) or (last == ["mul"] and "sub" in behind)
