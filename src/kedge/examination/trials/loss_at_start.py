"""The loss before the first step, beside that of a model that knows nothing.

A model that knows nothing gives each of C classes the probability 1/C, and its cross entropy is
log(C); with two, for which binary cross entropy stands, log(2). A fresh model whose loss is far
above is sure of wrong answers, as its last layer's weights are too large; far below, it is not
fresh, or it can read the answer. Predictions of numbers are compared with the best constant one,
the mean of the targets (Karpathy, "A Recipe for Training Neural Networks", 2019).

Cannot see: losses that are not PyTorch's own; a start that weights of classes move.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch.nn import functional as F  # noqa: N812 - the field's name for it

from kedge.examination.loss_facts import Target
from kedge.examination.result import Result, Verdict
from kedge.examination.step import ExaminedStep
from kedge.short_text import compact, counted

TRIAL = "loss-at-start"
FAR = 1.5
"""Times the loss of a model that knows nothing that are something to look at."""
NEAR = 0.5
"""The share of that loss under which a model is not fresh."""
FAR_FROM_MEAN = 10.0
"""Times the loss of the best constant prediction that are something to look at."""
LARGE = 20.0
"""The magnitude of a mean of targets from which on it is said not to be scaled,"""
FAR_AND_LARGE = 2.0
"""where the loss is so many times that of the best constant prediction."""
DID = "compared the first loss with that of a model that knows nothing"


def loss_at_start(step: ExaminedStep) -> Iterator[Result]:
    """Yield a result for each of PyTorch's losses in the step."""
    if step.loss is None:
        return
    if step.loss.has_softmax_of_one and step.loss.value == 0:
        came = "0, by a softmax over one value, which is 1 whatever that is"
        means = (
            "Nothing is learned. Cross entropy takes a value for each class: give it two, or take "
            "binary_cross_entropy_with_logits for one, or a loss of numbers for numbers."
        )
        yield Result(TRIAL, "wrong", DID, came, means, step.loss.where)
    for target in step.targets():
        if target.counted().numel() == 0:
            continue
        own = step.loss.value
        if len(step.loss.targets) == 1 and _is_reversed(target, own) and _descends(step):
            came = f"{compact(own)}, which is minus {target.loss}"
            means = "Training makes the loss of the predictions larger. Take the minus sign away."
            verdict: Verdict = "wrong"
            if target.has_classes and -own < NEAR * math.log(max(target.classes, 2)):
                verdict = "look"
                means += " A model that was trained before may be meant to forget."
            yield Result(TRIAL, verdict, DID, came, means, step.loss.where)
        elif target.is_weighted:
            yield Result(TRIAL, "untried", DID, "its classes or elements have weights")
        elif target.has_classes:
            yield _of_classes(target, target.classes, step.loss.where)
        elif target.has_chances:
            yield _of_classes(target, 2, step.loss.where)
        else:
            yield _of_values(target, step.loss.where)


def _mean_loss(target: Target) -> float:
    """Return the mean loss of the targets, whatever the program has made of it."""
    if target.has_classes:
        ignored = -100
        if target.ignored is not None:
            ignored = target.ignored
        return float(F.nll_loss(target.predicted, target.target, ignore_index=ignored))
    loss: Any = getattr(F, target.loss)
    return float(loss(target.predicted, target.target))


def _is_reversed(target: Target, value: float) -> bool:
    """Whether a loss is the mean loss of the targets with a minus sign."""
    mean = _mean_loss(target)
    return mean > 0 and math.isclose(value, -mean, rel_tol=1e-3)


def _descends(step: ExaminedStep) -> bool:
    """Whether the training is known to make the loss smaller: no adversaries, and nobody maximizes."""
    if step.training is None:
        return True
    groups = [group for each in step.training.optimizers for group in each.param_groups]
    maximizes = any(group.get("maximize", False) for group in groups)
    own = set(map(id, step.parameters.values()))
    holds = any(id(param) in own for param in step.training.held())
    return holds and not maximizes and not step.training.has_several


def _of_classes(target: Target, classes: int, where: str) -> Result:
    blank = math.log(classes)
    loss = _mean_loss(target)
    came = f"{compact(loss)}; {classes} classes at random have {compact(blank)}"
    verdict: Verdict = "ok"
    means = ""
    if not math.isfinite(loss):
        verdict = "wrong"
        means = "The first loss is not finite: see what the inputs and the weights hold."
    elif classes == 1:
        verdict = "wrong"
        means = "With one class the loss is zero whatever the model says."
    elif loss > FAR * blank:
        verdict = "look"
        means = (
            "If the model is fresh, it is sure of wrong answers: the weights of its last layer are "
            "too large, or what it is given is. The first steps only undo that."
        )
    elif loss < NEAR * blank:
        verdict = "look"
        means = (
            "The model knows more than a fresh one can. If it was not trained before, it can read "
            "the answer in what it is given."
        )
    return Result(TRIAL, verdict, DID, came, means, where)


def _of_values(target: Target, where: str) -> Result:
    values = target.counted().double()
    loss = float(F.mse_loss(target.predicted.double(), target.target.double()))
    spread = float(values.var(correction=0))
    came = (
        f"{compact(loss)} as a mean square, of {counted(values.numel(), 'target')} with mean "
        f"{compact(float(values.mean()))} and variance {compact(spread)}"
    )
    is_large = abs(float(values.mean())) > LARGE and loss > FAR_AND_LARGE * spread
    if spread > 0 and (loss > FAR_FROM_MEAN * spread or is_large):
        means = (
            f"Predicting their mean would have {compact(spread)}. Bring targets and predictions to "
            "one scale, such as mean 0 and variance 1, or start the last bias at the mean."
        )
        return Result(TRIAL, "look", DID, came, means, where)
    return Result(TRIAL, "ok", DID, came, "", where)
