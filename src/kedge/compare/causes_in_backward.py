"""Causes after the forward pass: in gradients, and in the optimizer's updates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from kedge.compare.alignment.sites import BACKWARD
from kedge.compare.first_parting import ROUNDING_ULPS, FirstParting, PartingCause, common_factor
from kedge.compare.measures import eps
from kedge.compare.parameter_names import names_of_parameters, share_of
from kedge.rules.recorded.optimizers import optimizers, unheld_parameters
from kedge.short_text import counted
from kedge.store.recording import Recording

#: The spread of the factors of all gradients if the loss was scaled.
SCALED = 1e-3
#: The spread of the factors of all updates if the learning rate was.
RATED = 0.02


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
    """The cause if all gradients are multiplied by one number.

    The loss is equal, or multiplied by it too.
    """
    same = facts.first.same
    gradients = facts.compared("out.grad", "param.grad")
    values = list(gradients)
    what = "the gradients"
    if same.kind == "loss":
        values.append(facts.sites.index(same))
        what = "it and the gradients"
    elif same.phase != BACKWARD:
        return None
    factor = common_factor(facts.ratios(values), SCALED)
    if factor is None or not gradients:
        return None
    many = counted(len(gradients), "gradient")
    return PartingCause(
        "scaled",
        f"another scale of the loss: {what} are {factor:.4g} times as large in B",
        f"at step {facts.step} the forward pass is {facts.equal_before()}, "
        f"and {many} differ by the same factor",
    )


def loss(facts: FirstParting) -> PartingCause | None:
    """The cause if the loss differs, or the first gradient."""
    same = facts.first.same
    before = f"at step {facts.step} the forward pass is {facts.equal_before()}"
    if same.kind == "loss":
        headline = f"another loss, or other targets: {same.text} is the first to differ"
        return PartingCause("loss", headline, before)
    gradients = facts.compared("out.grad", "param.grad")
    if same.phase != BACKWARD or facts.sites[gradients[0]] is not same:
        return None
    headline = "another loss, or other targets: the first gradient differs"
    return PartingCause("loss", headline, f"{before}, {same.text} is not")


def backward(facts: FirstParting) -> PartingCause | None:
    """The cause if a gradient differs though the one before is equal."""
    same = facts.first.same
    if same.phase != BACKWARD:
        return None
    return PartingCause(
        "backward",
        f"the backward pass differs from {same.text} on",
        f"at step {facts.step} the forward pass and the gradients before it are "
        f"{facts.equal_before()}",
    )


def norm(facts: FirstParting) -> PartingCause | None:
    """The cause if the norm at the end of backward differs, and no gradient does."""
    if facts.first.same.kind != "grad.norm":
        return None
    a, b = facts.pair(facts.sites.index(facts.first.same), "count")
    if np.isfinite([a, b]).all() and a != b:
        return _without_gradients(facts, round(a), round(b))
    return PartingCause(
        "clipping",
        "gradients are accumulated or scaled differently: "
        "their norm at the end of backward differs",
        f"at step {facts.step} the forward pass and all gradients of backward are "
        f"{facts.equal_before()}, their norm at its end is not",
    )


def _without_gradients(facts: FirstParting, a: int, b: int) -> PartingCause:
    """Return the cause if gradients have ``a`` numbers in A and ``b`` in B.

    Some parameters are without one, in one run.
    """
    comparison = facts.comparison
    if b < a:
        more, fewer, side, fewer_or_more = comparison.a, comparison.b, "B", "fewer"
    else:
        more, fewer, side, fewer_or_more = comparison.b, comparison.a, "A", "more"
    path_there = {}
    for same in facts.sites:
        if same.kind in ("param", "param.grad", "update"):
            if b < a:
                path_there[same.a.path] = same.b.path
            else:
                path_there[same.b.path] = same.a.path
    known = _with_gradients(more, facts.step)
    left = set(_with_gradients(fewer, facts.step))
    lost = [path for path in known if path_there.get(path) not in left]

    evidence = (
        f"at step {facts.step} gradients have {a:,} numbers in A and {b:,} in B; "
        "the forward pass and all gradients of backward that both have are equal"
    )
    if not lost:
        return PartingCause(
            "trainable",
            f"{fewer_or_more} parameters get gradients in B: "
            "some are frozen, or not used, in one run",
            f"{evidence}; kedge sites lists frozen parameters",
        )
    return PartingCause(
        "trainable",
        f"{_why_without(lost, more, fewer)} in {side}: {names_of_parameters(lost, known)}",
        f"the norm of all gradients is without {share_of(lost, known)} there; {evidence}",
    )


def _with_gradients(recording: Recording, step: int) -> list[str]:
    """Return the parameters that get gradients in a step.

    Those of any step are returned if none of this one are recorded.
    """
    in_step = []
    in_any = []
    for site in recording.of_kind("param.grad"):
        steps = recording.rows(site).step
        if step in steps:
            in_step.append(site.path)
        if len(steps):
            in_any.append(site.path)
    return in_step or in_any


def _why_without(lost: Sequence[str], more: Recording, fewer: Recording) -> str:
    """Return why parameters have gradients in one recording and none in the other."""
    before = _trainable(more)
    after = _trainable(fewer)
    owners = {path.rpartition(".")[0] for path in lost}
    if all(owner in after and after[owner] < before.get(owner, 0) for owner in owners):
        return "frozen"
    if unheld_parameters(fewer).intersection(lost):
        return "in no optimizer"
    return "without gradients"


def _trainable(recording: Recording) -> dict[str, int]:
    """Return the number of trainable elements of each module's own parameters."""
    found = {}
    for root in recording.roots:
        for module in root.modules:
            found[module["path"]] = module.get("trainable", 0)
    return found


def rate(facts: FirstParting) -> PartingCause | None:
    """The cause if all updates that differ are multiplied by one number."""
    if facts.first.same.kind != "update":
        return None
    every = facts.compared("update")
    updates = _above_rounding(facts, every)
    parted = [i for i in facts.parted("update") if i in updates]
    factor = common_factor(facts.ratios(parted), RATED)
    if factor is None or (len(parted) < len(updates) and abs(factor - 1) <= RATED):
        return None
    chosen = facts.paths(parted)
    known = facts.paths(updates)
    others = len(known) - len(chosen)
    changed = "the update is"
    if len(known) > 1:
        changed = f"the updates of {names_of_parameters(chosen, known)} are"
    larger = f"{changed} {factor:.4g} times as large in B"

    evidence = f"at step {facts.step} parameters, forward and gradients are {facts.equal_before()}"
    if others == 1:
        evidence += ", and so is 1 other update"
    elif others:
        evidence += f", and so are {counted(others, 'other update')}"
    if updates != every:
        evidence += f"; {counted(len(every) - len(updates), 'update')} left out, mere rounding"

    # The rates are those of an optimizer's first step.
    a = _rates(facts.comparison.a)
    b = _rates(facts.comparison.b)
    if facts.at_start and a and a == b:
        evidence += ", and the optimizers of both runs begin with the same learning rates"
        clipped = "gradients are changed differently after backward, for example by clipping"
        headline = f"{clipped}: {larger}"
        if abs(factor - 1) <= RATED:
            either = f"{clipped}, or the optimizer has other settings"
            headline = f"{either}: {changed} hardly larger or smaller in B"
        return PartingCause("clipping", headline, evidence)
    if facts.at_start and a and b:
        evidence += f"; the learning rates are {_listed(a)} in A, {_listed(b)} in B"
    what = "another learning rate"
    if others:
        what += " of some parameters"
    return PartingCause("rate", f"{what}: {larger}", evidence)


def _above_rounding(facts: FirstParting, updates: Sequence[int]) -> list[int]:
    """Return the updates that are more than the rounding of their parameters.

    That of a bias before a norm is not.
    """
    parameters = {facts.sites[i].a.path: i for i in facts.compared("param")}
    found = []
    for i in updates:
        same = facts.sites[i]
        ulp = eps(same.a.dtype)
        parameter = parameters.get(same.a.path)
        if ulp is None or parameter is None:
            found.append(i)
            continue
        size = max(facts.pair(parameter, "rms"))
        if max(facts.pair(i, "rms")) > ROUNDING_ULPS * ulp * size:
            found.append(i)
    return found


def _rates(recording: Recording) -> list[list[float]]:
    return [list(optimizer.rates) for optimizer in optimizers(recording) or ()]


def _listed(rates: list[list[float]]) -> str:
    """Return the learning rates of all groups in words."""
    return " and ".join(f"{rate:g}" for rate in chain.from_iterable(rates))


def optimizer(facts: FirstParting) -> PartingCause | None:
    """The cause if updates differ by different factors."""
    if facts.first.same.kind != "update":
        return None
    a = _types(facts.comparison.a)
    b = _types(facts.comparison.b)
    if not a or not b:
        headline = "another optimizer, or other settings of it"
    elif a == b:
        headline = f"other settings of the optimizer, {a}"
    else:
        headline = f"another optimizer: {a} in A, {b} in B"
    parted = len(facts.parted("update"))
    known = counted(len(facts.compared("update")), "update")
    return PartingCause(
        "optimizer",
        headline,
        f"at step {facts.step} parameters, forward and gradients are {facts.equal_before()}, "
        f"and {parted} of {known} differ, not by one factor",
    )


def _types(recording: Recording) -> str:
    return ", ".join(optimizer.type for optimizer in optimizers(recording) or ())
