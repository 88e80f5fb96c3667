"""What the loss is given: logits where it applies a softmax or a sigmoid itself, else logarithms of probabilities.

The graph of the loss was followed to the operation that made what it compares with the targets.

Cannot see: losses that are not PyTorch's own; what stands further behind than the last operation.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kedge.examination.loss_facts import Target
from kedge.examination.result import Result
from kedge.examination.step import ExaminedStep
from kedge.short_text import compact

TRIAL = "logits"
DID = "looked at what made the values that the loss is given"
FAR = 0.01
"""The difference of a sum of probabilities from 1 from which on they are none."""
_BEFORE_LOGITS = {
    "softmax": "The loss applies a softmax itself: of probabilities it learns slowly, and never "
    "gets below a floor. Return the logits, or take NLLLoss of log_softmax.",
    "sigmoid": "The loss applies a sigmoid or softmax itself. Return the logits.",
    "relu": "Logits have to be negative as well: where all are zero the loss learns nothing. Leave "
    "out the ReLU after the last layer.",
    "tanh": "Logits between -1 and 1 cannot be sure of anything. Leave out the tanh.",
}


def logits(step: ExaminedStep) -> Iterator[Result]:
    """Yield whether the values do not go with the loss."""
    where = step.where
    for target in step.targets():
        if target.logits_from is not None:
            means = _BEFORE_LOGITS.get(target.logits_from, "")
            came = f"{target.logits_from} made the logits of the loss"
            yield Result(TRIAL, "wrong" if means else "ok", DID, came, means, where)
        elif target.has_classes:
            yield _of_logarithms(target, where)


def _of_logarithms(target: Target, where: str) -> Result:
    dim = min(1, target.predicted.dim() - 1)
    sums = target.predicted.double().exp().sum(dim)
    off = float((sums - 1).abs().max())
    if torch.isfinite(sums).all() and off < FAR:
        return Result(TRIAL, "ok", DID, "they are logarithms of probabilities", "", where)
    came = (
        f"their exponentials add up to {compact(float(sums.min()))}..{compact(float(sums.max()))}"
    )
    means = "NLLLoss takes logarithms of probabilities: log_softmax, or CrossEntropyLoss of logits."
    return Result(TRIAL, "wrong", DID, came, means, where)
