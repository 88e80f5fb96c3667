"""What the loss is given: logits where it applies a softmax or a sigmoid itself, else logarithms of probabilities.

The graph of the loss was followed to the operation that made what it compares with the targets. If
that is a sigmoid, a tanh or a ReLU, targets that it cannot reach are counted.

Cannot see: losses that are not PyTorch's own; what stands further behind than the last operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kedge.examination.loss_calls import LossCall
from kedge.examination.loss_facts import Target
from kedge.examination.result import Result, Verdict
from kedge.examination.step import ExaminedStep
from kedge.short_text import compact, percent

TRIAL = "logits"
DID = "looked at what made the values that the loss is given"
FAR = 0.01
"""The difference of a sum of probabilities from 1 from which on they are none."""
ROUNDED = 16.0
"""The same of a log_softmax, in units of its dtype's precision, where that is more: in bfloat16."""
MARGIN = 0.05
"""How far beyond the end a target has to be, so that no rounding or noise has put it there."""
SOME = 0.02
MANY = 0.25
"""The shares of such targets that are something to look at, and certain to be wrong."""
_REACHED = {"sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0), "relu": (0.0, math.inf)}
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
    if step.loss is not None:
        for call in step.loss.calls:
            yield from _of_call(call, where)
    for target in step.targets():
        if target.has_classes and target.logits_from is not None and _is_over_others(target):
            yield _of_other_dimension(target, where)
        elif target.logits_from is not None:
            means = _BEFORE_LOGITS.get(target.logits_from, "")
            came = f"{target.logits_from} made the logits of the loss"
            yield Result(TRIAL, "wrong" if means else "ok", DID, came, means, where)
        elif target.has_classes:
            yield _of_logarithms(target, where)
        elif target.values_from in _REACHED:
            yield from _of_values(target, where)


def _of_call(call: LossCall, where: str) -> Iterator[Result]:
    """Yield whether a loss that compares probabilities is given something else."""
    predicted, target = call.predicted.double(), call.target.double()
    if predicted.dim() < 2 or predicted.shape != target.shape or predicted.numel() == 0:
        return
    if call.name == "kl_div" and float(predicted.min()) >= 0 and _sums_to_one(predicted, -1):
        came = "kl_div was given probabilities as its input, whose rows add up to 1"
        means = "It takes their logarithms, which are below zero: log_softmax in place of softmax."
        yield Result(TRIAL, "wrong", DID, came, means, where)
    has_classes = call.name == "cross_entropy" and predicted.shape[1] > 1
    if has_classes and not _sums_to_one(target, 1):
        sums = target.sum(1)
        came = (
            "cross_entropy was given targets as probabilities, and they add up to "
            f"{compact(float(sums.min()))}..{compact(float(sums.max()))}"
        )
        means = (
            "Where several classes are right at once, each is a question of its own: "
            "binary_cross_entropy_with_logits. As probabilities of one class they add up to 1."
        )
        yield Result(TRIAL, "look", DID, came, means, where)


def _sums_to_one(values: Tensor, dim: int) -> bool:
    return bool(((values.sum(dim) - 1).abs() < FAR).all())


def _of_values(target: Target, where: str) -> Iterator[Result]:
    """Yield whether targets are beyond what the last operation can return."""
    lowest, highest = _REACHED[target.values_from or ""]
    values = target.counted().double()
    beyond = (values < lowest - MARGIN) | (values > highest + MARGIN)
    share = float(beyond.double().mean())
    did = "compared the targets with what the last operation can return"
    if share <= SOME:
        return
    came = (
        f"{target.values_from} returns numbers from {lowest:g} to {highest:g}, and "
        f"{percent(share)} of the targets are beyond: from {compact(float(values.min()))} to "
        f"{compact(float(values.max()))}"
    )
    means = (
        "They cannot be reached, and the nearer the predictions come to the end, the smaller the "
        "slope. Scale the targets, or leave out the last activation."
    )
    verdict: Verdict = "look"
    if share > MANY:
        verdict = "wrong"
    yield Result(TRIAL, verdict, did, came, means, where)


def _sums_of_classes(target: Target) -> Tensor:
    """Return what the exponentials of predictions add up to, over the classes."""
    dim = min(1, target.predicted.dim() - 1)
    return target.predicted.double().exp().sum(dim)


def _is_over_others(target: Target) -> bool:
    """Whether the log_softmax of a loss is over another dimension than the classes."""
    sums = _sums_of_classes(target)
    rounding = ROUNDED * torch.finfo(target.predicted.dtype).eps
    off = float((sums - 1).abs().max()) if sums.numel() else 0.0
    return bool(torch.isfinite(sums).all()) and off > max(FAR, rounding)


def _of_other_dimension(target: Target, where: str) -> Result:
    sums = _sums_of_classes(target)
    came = (
        "log_softmax made what the loss is given, and the probabilities of the classes add up to "
        f"{compact(float(sums.min()))}..{compact(float(sums.max()))}"
    )
    means = (
        "It is taken over another dimension than that of the classes, such as over dimension 0, the "
        "samples: log_softmax(dim=1), or CrossEntropyLoss of logits."
    )
    return Result(TRIAL, "wrong", DID, came, means, where)


def _of_logarithms(target: Target, where: str) -> Result:
    sums = _sums_of_classes(target)
    off = float((sums - 1).abs().max())
    if torch.isfinite(sums).all() and off < FAR:
        return Result(TRIAL, "ok", DID, "they are logarithms of probabilities", "", where)
    came = (
        f"their exponentials add up to {compact(float(sums.min()))}..{compact(float(sums.max()))}"
    )
    means = "NLLLoss takes logarithms of probabilities: log_softmax, or CrossEntropyLoss of logits."
    return Result(TRIAL, "wrong", DID, came, means, where)
