"""LOSS-BELOW-ZERO: losses below the least value that they can have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kedge.frames import SourceLine
from kedge.rules.evidence import Evidence, said, unsaid
from kedge.rules.naming import line_of, plain
from kedge.rules.recorded.losses import Loss, losses
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.samples import no_loss_graph
from kedge.rules.rule import Finding, Lack, Rule, Severity
from kedge.sites.operation_names import recorded_names
from kedge.store.events import LossGraphEvent
from kedge.store.recording import Recording
from kedge.store.rows import Bools

#: Losses that are never below zero for valid input, and the input of one that is.
_GIVEN = {
    "nll_loss": "its input must be log-probabilities",
    "binary_cross_entropy": "its targets must be between 0 and 1",
    "binary_cross_entropy_with_logits": "its targets must be between 0 and 1",
}
_REMEDIES = {
    "nll_loss": "Use cross_entropy on the output of the last linear layer, or "
    "log_softmax before nll_loss; weights of classes must not be negative.",
    "binary_cross_entropy": "Scale the targets to between 0 and 1: divide masks of 0 "
    "and 255 by 255, replace labels of -1 and 1 by (labels + 1) / 2.",
    "neg": "Remove the minus sign, unless the loss is meant to mislead another model.",
}
#: Operations that do not change the sign of a loss.
_KEEPS = frozenset(
    ("mean", "sum", "div", "to_copy", "squeeze", "view", "reshape", "clone", "select")
)


@dataclass(frozen=True, kw_only=True)
class LossBelowZeroEvidence(Evidence):
    """The operation that made the loss, and how often it was below zero."""

    operation: str = said("operation {}")
    least: float | None = said("least {}")
    below: int = said("{} of them below zero")
    losses: int = said("{} losses")
    source: SourceLine | None = unsaid()


@dataclass(frozen=True)
class LossBelowZero(Rule):
    """A loss that cannot be negative is below zero, or has the wrong sign.

    Meaning:
        Cross-entropy is a sum of negated logarithms of probabilities, so it cannot be negative. If
        it is, its input is not what it expects, and training raises or lowers numbers without
        limit.

    Formula:
        The autograd nodes from the loss backwards: nll_loss, binary_cross_entropy or
        binary_cross_entropy_with_logits, with only means, sums and divisions in between. Reported
        in the first step in which its value is below -least. If only a minus sign is between them
        and the program has no other loss, it is reported as a loss with the wrong sign.

    Window:
        All steps with a loss.

    Thresholds:
        - least (1e-3): rounding and label smoothing stay above -least.

    Severity:
        - warning: the loss is below zero; or it is one of these with a minus sign, and is not
          finite at the end.
        - info: the loss is one of these with a minus sign, as in adversarial training.

    Evidence:
        The least value, the number of steps in which the loss was below zero, and the line that
        calls backward.

    Remedy:
        Pass log-probabilities to nll_loss, and targets between 0 and 1 to binary_cross_entropy.
    """

    least: float = 1e-3

    code = "LOSS-BELOW-ZERO"
    name = "a loss is below its lowest possible value"
    severity = "warning"
    follows = "DOUBLE-SOFTMAX"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every line that calls backward."""
        chains = {
            event.site: recorded_names(event.nodes)
            for event in events_of(recording, LossGraphEvent)
        }
        courses = losses(recording)
        for loss in courses:
            name = _behind(chains.get(loss.site.site, ()))
            turned = name is not None and name.startswith("-")
            below = loss.values < -self.least
            if name is not None and below.any() and not (turned and len(courses) > 1):
                yield self._finding(loss, below, name.removeprefix("-"), turned=turned)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of a recorded graph of the loss; without training there is none."""
        return no_loss_graph(self.code, recording)

    def _finding(self, loss: Loss, below: Bools, name: str, *, turned: bool) -> Finding:
        first = int(loss.steps[below.argmax()])
        source = loss.site.source
        where = ""
        if source:
            where = f" at {line_of(source)}"
        least = float(loss.values.min())
        seen = f"first in step {first}, lowest value {least:.3g}"
        count = f"in {int(below.sum())} of {len(below)} steps ({seen})"
        head = f"The loss ({loss.site.site}{where})"
        severity: Severity = "warning"
        confidence = 0.95
        if turned:
            remedy = _REMEDIES["neg"]
            says = (
                f"{head} is {name} with a minus sign: the optimizer increases {name}. "
                f"It was below zero {count}"
            )
            if loss.ends_badly:
                says += ", and it is not finite at the end."
            else:
                says += "."
                severity = "info"
                confidence = 0.7
        else:
            remedy = _REMEDIES[name.removesuffix("_with_logits")]
            given = _GIVEN[name]
            says = f"{head} is {name}, which cannot be below zero, but was {count}: {given}."
        return Finding(
            code=self.code,
            severity=severity,
            site=loss.site.site,
            step=first,
            message=says,
            evidence=LossBelowZeroEvidence(
                operation=name,
                least=plain(least),
                below=int(below.sum()),
                losses=len(below),
                source=source,
            ),
            confidence=confidence,
            remedy=remedy,
        )


def _behind(chain: Sequence[str]) -> str | None:
    """Return the loss that a chain of operations begins with, after a ``-`` if it is negated; None if it is not such a loss."""
    sign = ""
    for at, name in enumerate(chain):
        loss = "nll_loss" if name.startswith("nll_loss") else name  # images have nll_loss2d
        if loss in _GIVEN:
            if loss == "nll_loss" and _is_weighed(chain[at + 1 :]):
                return None
            return sign + loss
        if name == "neg" and not sign:
            sign = "-"
        elif name not in _KEEPS:
            return None
    return None


def _is_weighed(behind: Sequence[str]) -> bool:
    """Whether the program multiplies logarithms of probabilities before the loss, as a policy gradient does by rewards."""
    return "log_softmax" in behind and "mul" in behind[: behind.index("log_softmax")]
