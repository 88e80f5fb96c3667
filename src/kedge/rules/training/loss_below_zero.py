"""LOSS-BELOW-ZERO: losses below the least value that they can have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.frames import SourceLine
from kedge.rules.evidence import Evidence, said, unsaid
from kedge.rules.naming import line_of, plain
from kedge.rules.nonfinite.evidence import RowEvidence
from kedge.rules.recorded.losses import Loss, ascending, losses
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.samples import no_loss_graph
from kedge.rules.rule import Finding, Lack, Rule, Severity
from kedge.rules.training.spike import has_moving_goal
from kedge.sites.operation_names import recorded_names
from kedge.store.events import LossGraphEvent
from kedge.store.recording import Recording
from kedge.store.rows import Bools, Floats

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
    """A loss that cannot be negative is below zero, has the wrong sign, or falls without bound.

    Meaning:
        Cross-entropy is a sum of negated logarithms of probabilities, so it cannot be negative. If
        it is, its input is not what it expects, and training raises or lowers numbers without
        limit. Any other loss that falls below zero ever faster, as the negated squared error does,
        has nothing that bounds it: there is no end at which the model would be good.

    Formula:
        The autograd nodes from the loss backwards: nll_loss, binary_cross_entropy or
        binary_cross_entropy_with_logits, with only means, sums and divisions in between. Reported
        in the first step in which its value is below -least. If only a minus sign is between them
        and the program has no other loss, it is reported as a loss with the wrong sign.

        Of any other loss: every value of the last quarter is below zero, and their median is at
        least far times the largest of the first head values in magnitude and faster times the
        median of the quarter before; or beyond times the former, and below -beyond. Or the last
        head values are below zero, each lower than the one before, and the last of all is as far:
        so a loss ends that runs away. Losses with a moving goal, as in a GAN, are left out.

    Window:
        All steps with a finite loss; at least min_losses to see that it falls without bound, or
        twice head if it runs away.

    Thresholds:
        - far (10), faster (2): a loss that falls in a straight line reaches 1.4 times the quarter
          before; a density that is fitted ever better falls more slowly still.
        - beyond (1000): what went so far may have become noise.
        - head (5), min_losses (40): enough for a median of each quarter.
        - least (1e-3): rounding and label smoothing stay above -least.

    Severity:
        - warning: the loss is below zero, or falls without bound; or it is one of these with a
          minus sign, and is not finite at the end, or far times its first values in magnitude.
        - info: the loss is one of these with a minus sign, as in adversarial training.

    Evidence:
        The least value, the number of steps in which the loss was below zero, and the line that
        calls backward.

    Remedy:
        Pass log-probabilities to nll_loss, and targets between 0 and 1 to binary_cross_entropy.
        Check the sign of the loss, and of each term of it.

    Cannot see:
        A term of the wrong sign that the others hold, so that the loss stays above zero or
        levels off; in a program with several losses, the sign of one.
    """

    least: float = 1e-3
    far: float = 10.0
    faster: float = 2.0
    beyond: float = 1000.0
    head: int = 5
    min_losses: int = 40

    code = "LOSS-BELOW-ZERO"
    name = "a loss is below its lowest possible value"
    severity = "warning"
    of_training = True
    follows = "DOUBLE-SOFTMAX"
    leads_to = "NAN-BORN"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every line that calls backward."""
        chains = {
            event.site: recorded_names(event.nodes)
            for event in events_of(recording, LossGraphEvent)
        }
        courses = losses(recording)
        large = ascending(recording)
        for loss in courses:
            name = _behind(chains.get(loss.site.site, ()))
            turned = name is not None and name.startswith("-")
            below = loss.values < -self.least
            if name is not None and below.any() and not (turned and len(courses) > 1):
                yield self._finding(loss, below, name.removeprefix("-"), turned=turned)
                continue
            if loss.site.site in large or has_moving_goal(recording, len(courses)):
                continue
            operation = (chains.get(loss.site.site) or [""])[0]
            if self._falls(loss.values):
                quarter = len(loss.values) // 4
                late = float(np.median(loss.values[-quarter:]))
                yield self._unbounded(loss, operation, f"and its last quarter is at {late:.3g}")
            elif self._runs_away(loss.values):
                how = f"ever faster in the last {self.head} finite values"
                yield self._unbounded(loss, operation, how)

    def explains(
        self,
        recording: Recording,  # noqa: ARG002 - others need it
        finding: Finding,
        other: Finding,
    ) -> bool:
        """Return whether the loss can be the cause of another finding.

        Of a NaN, if it was made later, where values had grown without end or the loss itself had.
        """
        if other.code != "NAN-BORN":
            return True
        if other.step <= finding.step:
            return False
        rows = other.evidence
        has_grown = isinstance(rows, RowEvidence) and rows.has_grown
        return has_grown or other.site == finding.site

    def _falls(self, values: Floats) -> bool:
        """Whether a loss falls below zero ever faster."""
        quarter = len(values) // 4
        if len(values) < self.min_losses:
            return False
        last, before = values[-quarter:], values[-2 * quarter : -quarter]
        depth = -float(np.median(last))
        first = float(np.abs(values[: self.head]).max())
        grows = depth >= self.faster * max(-float(np.median(before)), 0.0)
        is_far = depth >= self.far * first and grows
        return bool(last.max() < 0 and (is_far or depth >= self._beyond(first)))

    def _beyond(self, first: float) -> float:
        """Return the depth that is out of bounds: a loss that begins next to zero is not there soon."""
        return self.beyond * max(first, 1.0)

    def _is_far(self, values: Floats) -> bool:
        """Whether the last quarter of a loss lies far below where it began."""
        quarter = max(len(values) // 4, 1)
        first = float(np.abs(values[: self.head]).max())
        return -float(np.median(values[-quarter:])) >= self.far * first

    def _runs_away(self, values: Floats) -> bool:
        """Whether the last values of a loss fall from step to step, to where nothing bounds it."""
        if len(values) < 2 * self.head:
            return False
        last = values[-self.head :]
        first = float(np.abs(values[: self.head]).max())
        falls = last[0] < 0 and bool((np.diff(last) < 0).all())
        return falls and -float(last[-1]) >= self._beyond(first)

    def _unbounded(self, loss: Loss, operation: str, how: str) -> Finding:
        first = float(loss.values[0])
        least = float(loss.values.min())
        lower = loss.values < loss.values[: self.head].min()
        source = loss.site.source
        where = ""
        if source:
            where = f" at {line_of(source)}"
        return Finding(
            code=self.code,
            severity="warning",
            site=loss.site.site,
            step=int(loss.steps[lower.argmax()]),
            message=f"The loss ({loss.site.site}{where}) falls without bound: from {first:.3g} to "
            f"{least:.3g}, {how}. Is its sign right?",
            evidence=LossBelowZeroEvidence(
                operation=operation,
                least=plain(least),
                below=int((loss.values < 0).sum()),
                losses=len(loss.values),
                source=source,
            ),
            confidence=0.8,
            remedy="Check the sign of the loss, and of each term of it: the optimizer makes it "
            "small, so an error is added and not subtracted.",
        )

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
            elif self._is_far(loss.values):
                says += f": {self.far:g} times what it began with, and more."
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
