"""Causes after the forward pass: in gradients, and in the optimizer's updates."""

from __future__ import annotations

from kedge.compare.alignment.sites import BACKWARD
from kedge.compare.first_parting import FirstParting, PartingCause, common_factor
from kedge.numbers import counted
from kedge.rules.recorded.optimizers import optimizers
from kedge.store.recording import Recording

#: The spread of the factors of all gradients if the loss was scaled, and of all updates if the rate was.
SCALED, RATED = 1e-3, 0.02


def dtype(facts: FirstParting) -> PartingCause | None:
    """The cause if a gradient has another dtype."""
    same = facts.first.same
    if same.a.dtype == same.b.dtype:
        return None
    return PartingCause(
        "dtype",
        f"another dtype: {same.text} is {same.a.dtype} in A and {same.b.dtype} in B",
        f"at step {facts.step} everything before it is {facts.equal_before()}",
    )


def scaled(facts: FirstParting) -> PartingCause | None:
    """The cause if all gradients are multiplied by one number."""
    gradients = facts.compared("out.grad", "param.grad")
    factor = common_factor(facts.ratios(gradients), SCALED)
    if facts.first.same.phase != BACKWARD or factor is None:
        return None
    return PartingCause(
        "scaled",
        f"another scale of the loss: the gradients are {factor:.4g} times as large in B",
        f"at step {facts.step} the forward pass is {facts.equal_before()}, "
        f"and {counted(len(gradients), 'gradient')} differ by the same factor",
    )


def loss(facts: FirstParting) -> PartingCause | None:
    """The cause if the loss differs, or the first gradient."""
    same = facts.first.same
    if same.kind == "loss":
        before = f"at step {facts.step} the forward pass is {facts.equal_before()}"
        return PartingCause("loss", f"another loss, or other targets: {same.text} is the first to differ", before)
    gradients = facts.compared("out.grad", "param.grad")
    if same.phase != BACKWARD or facts.sites[gradients[0]] is not same:
        return None
    return PartingCause(
        "loss",
        "another loss, or other targets: the first gradient differs",
        f"at step {facts.step} the forward pass is {facts.equal_before()}, {same.text} is not",
    )


def backward(facts: FirstParting) -> PartingCause | None:
    """The cause if a gradient differs though the one before is equal."""
    same = facts.first.same
    if same.phase != BACKWARD:
        return None
    return PartingCause(
        "backward",
        f"the backward pass differs from {same.text} on",
        f"at step {facts.step} the forward pass and the gradients before it are {facts.equal_before()}",
    )


def norm(facts: FirstParting) -> PartingCause | None:
    """The cause if the norm at the end of backward differs, and no gradient does."""
    if facts.first.same.kind != "grad.norm":
        return None
    if facts.first.statistic == "count":
        a, b = (round(value) for value in (facts.first.a, facts.first.b))
        return PartingCause(
            "trainable",
            f"{'fewer' if b < a else 'more'} parameters get gradients in B: some are frozen, or not used, in one run",
            f"at step {facts.step} gradients have {a:,} numbers in A and {b:,} in B; "
            "the forward pass and all gradients of backward that both have are equal; kedge sites lists frozen parameters",
        )
    return PartingCause(
        "clipping",
        "gradients are accumulated or scaled differently: their norm at the end of backward differs",
        f"at step {facts.step} the forward pass and all gradients of backward are {facts.equal_before()}, "
        "their norm at its end is not",
    )


def rate(facts: FirstParting) -> PartingCause | None:
    """The cause if all updates are multiplied by one number."""
    updates = facts.compared("update")
    factor = common_factor(facts.ratios(updates), RATED)
    if facts.first.same.kind != "update" or factor is None:
        return None
    same = "the update is" if len(updates) == 1 else f"the updates of all {len(updates)} parameters are"
    rates = [_rates(recording) for recording in (facts.comparison.a, facts.comparison.b)]
    if facts.at_start and rates[0] and rates[0] == rates[1]:  # they are those of an optimizer's first step
        return PartingCause(
            "clipping",
            f"gradients are changed differently after backward, for example by clipping: {same} {factor:.4g} times as large in B",
            f"at step {facts.step} parameters, forward and gradients are {facts.equal_before()}, "
            "and the optimizers of both runs begin with the same learning rates",
        )
    return PartingCause(
        "rate",
        f"another learning rate: {same} {factor:.4g} times as large in B",
        f"at step {facts.step} parameters, forward and gradients are {facts.equal_before()}",
    )


def _rates(recording: Recording) -> list[list[float]]:
    return [entry.get("rates", []) for entry in optimizers(recording) or ()]


def optimizer(facts: FirstParting) -> PartingCause | None:
    """The cause if updates differ by different factors."""
    if facts.first.same.kind != "update":
        return None
    parted, all_of = facts.parted("update"), facts.compared("update")
    return PartingCause(
        "optimizer",
        "another optimizer, or other settings of it",
        f"at step {facts.step} parameters, forward and gradients are {facts.equal_before()}, and "
        f"{len(parted)} of {counted(len(all_of), 'update')} differ, not by one factor",
    )
