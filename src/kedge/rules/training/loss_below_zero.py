"""Losses below the least value that they can have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kedge.rules.losses import LossCourse, losses
from kedge.rules.naming import plain
from kedge.rules.nonfinite.advice import operations
from kedge.rules.optimizers import events_of
from kedge.rules.rule import Finding, Lack, Severity
from kedge.rules.trained import trains
from kedge.store.recording import Recording
from kedge.store.rows import Bools

#: Losses that are never below zero for what they are made for, and what was given to one that is.
_GIVEN = {
    "nll_loss": "it takes logarithms of probabilities, and these cannot be",
    "binary_cross_entropy": "its targets must lie between 0 and 1",
    "binary_cross_entropy_with_logits": "its targets must lie between 0 and 1",
}
_REMEDIES = {
    "nll_loss": "Take cross_entropy on what the last linear layer returns, or log_softmax before nll_loss; weights of classes "
    "must not be negative.",
    "binary_cross_entropy": "Bring the targets to 0 and 1: masks of 0 and 255 want dividing by 255, labels of -1 and 1 want "
    "(labels + 1) / 2.",
    "neg": "Leave out the minus sign, unless another model is to be misled on purpose.",
}
#: Operations that leave the sign of a loss as it is.
_KEEPS = frozenset(("mean", "sum", "div", "to_copy", "squeeze", "view", "reshape", "clone", "select"))


@dataclass(frozen=True)
class LossBelowZero:
    """A loss that cannot be below zero is, or has its sign turned.

    What it says:
        Cross-entropy is a sum of logarithms of probabilities, each taken with the opposite sign: it cannot be negative.
        Where it is, it was given something else, so that training raises or lowers numbers without a bound.

    Formula:
        The autograd nodes from the loss backwards: nll_loss, binary_cross_entropy or binary_cross_entropy_with_logits,
        behind means, sums and divisions alone. Reported in the first step in which its value is below -least; if one of them
        stands behind a minus sign alone and the program has no other loss, that its sign is turned.

    Window:
        All steps with a loss.

    Thresholds:
        - least (1e-3): rounding and label smoothing do not go so far below zero.

    Severity:
        - warning: the loss is below zero; or it is one of these with its sign turned, and is not finite in the end.
        - info: the loss is one of these with its sign turned, as adversarial training has it too.

    Evidence:
        The least value and its step, in how many steps the loss was below zero, and the line that calls backward.

    Remedy:
        Give nll_loss logarithms of probabilities, and binary_cross_entropy targets between 0 and 1.
    """

    least: float = 1e-3

    code: ClassVar[str] = "LOSS-BELOW-ZERO"
    name: ClassVar[str] = "a loss is below the least value that it can have"
    severity: ClassVar[Severity] = "warning"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give at most one finding for every line that calls backward."""
        chains = {
            str(event.get("site", "")): operations(event.get("nodes", ()))
            for event in events_of(recording, "loss-graph")
        }
        courses = losses(recording)
        for loss in courses:
            name = _behind(chains.get(loss.site.site, ()))
            turned = name is not None and name.startswith("-")
            below = loss.values < -self.least
            if name is not None and below.any() and not (turned and len(courses) > 1):
                yield self._finding(loss, below, name.removeprefix("-"), turned=turned)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return that the graph of the loss was not recorded; without training there is none."""
        if not trains(recording) or events_of(recording, "loss-graph"):
            return None
        return Lack(self.code, "record of the loss's graph", 0, 1, grows=False)

    def _finding(self, loss: LossCourse, below: Bools, name: str, *, turned: bool) -> Finding:
        first, source = int(loss.steps[below.argmax()]), loss.site.source
        where = f" at {source['file']}:{source['line']}" if source else ""
        least = float(loss.values.min())
        count = f"in {int(below.sum())} of {len(below)} steps, first in step {first}, and down to {least:.3g}"
        head = f"The loss ({loss.site.site}{where})"
        doubtful = turned and not loss.ends_badly
        if turned:
            says = f"{head} is {name} with its sign turned: the optimizer raises {name}. It was below zero {count}"
            says += ", and is not finite in the end." if loss.ends_badly else "."
        else:
            given = _GIVEN[name]
            says = f"{head} is {name}, which cannot be below zero, and was {count}: {given}."
        return Finding(
            code=self.code,
            severity="info" if doubtful else "warning",
            site=loss.site.site,
            step=first,
            message=says,
            evidence={
                "operation": name,
                "least": plain(least),
                "below": int(below.sum()),
                "losses": len(below),
                "source": dict(source) if source else None,
            },
            confidence=0.7 if doubtful else 0.95,
            remedy=_REMEDIES["neg" if turned else name.removesuffix("_with_logits")],
        )


def _behind(chain: Sequence[str]) -> str | None:
    """Return the loss that a chain of operations begins with, after a ``-`` if its sign is turned; None if it is no such loss."""
    sign = ""
    for at, name in enumerate(chain):
        loss = "nll_loss" if name.startswith("nll_loss") else name  # images have one of their own
        if loss in _GIVEN:
            return None if loss == "nll_loss" and _is_weighed(chain[at + 1 :]) else sign + loss
        if name == "neg" and not sign:
            sign = "-"
        elif name not in _KEEPS:
            return None
    return None


def _is_weighed(behind: Sequence[str]) -> bool:
    """Whether logarithms of probabilities are multiplied before a loss takes them, as by a policy's rewards."""
    return "log_softmax" in behind and "mul" in behind[: behind.index("log_softmax")]
