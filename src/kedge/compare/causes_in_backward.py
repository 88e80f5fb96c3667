"""Causes after the forward pass: in gradients, and in the optimizer's updates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kedge.compare.alignment.sites import BACKWARD
from kedge.compare.first_parting import ROUNDING_ULPS, FirstParting, PartingCause, common_factor
from kedge.compare.measures import eps
from kedge.compare.parameter_names import names_of_parameters, share_of
from kedge.rules.recorded.optimizers import optimizers, unheld_parameters
from kedge.short_text import counted
from kedge.store.recording import Recording

#: The spread of the factors of all gradients if the loss was scaled, and of all updates if the rate
#: was.
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
    """The cause if all gradients are multiplied by one number, and the loss is equal or multiplied by it, too."""
    gradients, same = facts.compared("out.grad", "param.grad"), facts.first.same
    losses = [facts.sites.index(same)] if same.kind == "loss" else []
    factor = common_factor(facts.ratios([*losses, *gradients]), SCALED)
    if (same.phase != BACKWARD and not losses) or factor is None or not gradients:
        return None
    many = counted(len(gradients), "gradient")
    return PartingCause(
        "scaled",
        f"another scale of the loss: {'it and ' * bool(losses)}the gradients are {factor:.4g} times as large in B",
        f"at step {facts.step} the forward pass is {facts.equal_before()}, and {many} differ by the same factor",
    )


def loss(facts: FirstParting) -> PartingCause | None:
    """The cause if the loss differs, or the first gradient."""
    same = facts.first.same
    if same.kind == "loss":
        before = f"at step {facts.step} the forward pass is {facts.equal_before()}"
        return PartingCause(
            "loss", f"another loss, or other targets: {same.text} is the first to differ", before
        )
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
    place = facts.sites.index(facts.first.same)
    a, b = (facts.comparison.value(place, facts.column, "count", side) for side in ("a", "b"))
    if np.isfinite([a, b]).all() and a != b:
        return _without_gradients(facts, round(a), round(b))
    return PartingCause(
        "clipping",
        "gradients are accumulated or scaled differently: their norm at the end of backward differs",
        f"at step {facts.step} the forward pass and all gradients of backward are {facts.equal_before()}, "
        "their norm at its end is not",
    )


def _without_gradients(facts: FirstParting, a: int, b: int) -> PartingCause:
    """Return the cause if gradients have ``a`` numbers in A and ``b`` in B: some parameters are without, in one run."""
    comparison, side = facts.comparison, "B" if b < a else "A"
    more, fewer = (comparison.a, comparison.b) if b < a else (comparison.b, comparison.a)
    known, left = _with_gradients(more, facts.step), set(_with_gradients(fewer, facts.step))
    pairs = [
        (same.a.path, same.b.path)
        for same in facts.sites
        if same.kind in ("param", "param.grad", "update")
    ]
    path_there = dict(pairs if b < a else [(other, one) for one, other in pairs])
    lost = [path for path in known if path_there.get(path) not in left]
    evidence = (
        f"at step {facts.step} gradients have {a:,} numbers in A and {b:,} in B; "
        "the forward pass and all gradients of backward that both have are equal"
    )
    if not lost:
        headline = f"{'fewer' if b < a else 'more'} parameters get gradients in B: some are frozen, or not used, in one run"
        return PartingCause(
            "trainable", headline, f"{evidence}; kedge sites lists frozen parameters"
        )
    return PartingCause(
        "trainable",
        f"{_why_without(lost, more, fewer)} in {side}: {names_of_parameters(lost, known)}",
        f"the norm of all gradients is without {share_of(lost, known)} there; {evidence}",
    )


def _with_gradients(recording: Recording, step: int) -> list[str]:
    """Return the parameters that get gradients in a step; in any step, if those of this one are not recorded."""
    rows = {site.path: recording.rows(site).step for site in recording.of_kind("param.grad")}
    return [path for path, steps in rows.items() if step in steps] or [
        path for path, steps in rows.items() if len(steps)
    ]


def _why_without(lost: Sequence[str], more: Recording, fewer: Recording) -> str:
    """Return why parameters have gradients in one recording and none in the other."""
    before, after = (_trainable(recording) for recording in (more, fewer))
    owners = {path.rpartition(".")[0] for path in lost}
    if all(owner in after and after[owner] < before.get(owner, 0) for owner in owners):
        return "frozen"
    return "in no optimizer" if unheld_parameters(fewer).intersection(lost) else "without gradients"


def _trainable(recording: Recording) -> dict[str, int]:
    """Return the number of trainable elements of each module's own parameters."""
    return {
        module["path"]: module.get("trainable", 0)
        for root in recording.roots
        for module in root.modules
    }


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
    chosen, known = facts.paths(parted), facts.paths(updates)
    changed = (
        "the update is"
        if len(known) == 1
        else f"the updates of {names_of_parameters(chosen, known)} are"
    )
    others = len(known) - len(chosen)
    evidence = f"at step {facts.step} parameters, forward and gradients are {facts.equal_before()}"
    evidence += (
        f", and so {'is' if others == 1 else 'are'} {counted(others, 'other update')}"
        if others
        else ""
    )
    evidence += (
        f"; {counted(len(every) - len(updates), 'update')} left out, mere rounding"
        if updates != every
        else ""
    )
    a, b = (_rates(recording) for recording in (facts.comparison.a, facts.comparison.b))
    if facts.at_start and a and a == b:  # they are those of an optimizer's first step
        evidence += ", and the optimizers of both runs begin with the same learning rates"
        clipped = "gradients are changed differently after backward, for example by clipping"
        if abs(factor - 1) <= RATED:
            other = f"{clipped}, or the optimizer has other settings"
            return PartingCause(
                "clipping", f"{other}: {changed} hardly larger or smaller in B", evidence
            )
        return PartingCause(
            "clipping", f"{clipped}: {changed} {factor:.4g} times as large in B", evidence
        )
    if facts.at_start and a and b:
        evidence += f"; the learning rates are {_listed(a)} in A, {_listed(b)} in B"
    some = " of some parameters" if others else ""
    headline = f"another learning rate{some}: {changed} {factor:.4g} times as large in B"
    return PartingCause("rate", headline, evidence)


def _above_rounding(facts: FirstParting, updates: Sequence[int]) -> list[int]:
    """Return the updates that are more than the rounding of their parameters, as that of a bias before a norm is."""
    sizes = {facts.sites[i].a.path: i for i in facts.compared("param")}
    found = []
    for i in updates:
        same = facts.sites[i]
        ulp, place = eps(same.a.dtype), sizes.get(same.a.path)
        change, size = (_largest(facts, where) for where in (i, place))
        if ulp is None or size is None or change is None or change > ROUNDING_ULPS * ulp * size:
            found.append(i)
    return found


def _largest(facts: FirstParting, site: int | None) -> float | None:
    """Return the larger root mean square of a site in the two recordings; None for no site."""
    if site is None:
        return None
    return max(facts.comparison.value(site, facts.column, "rms", side) for side in ("a", "b"))


def _rates(recording: Recording) -> list[list[float]]:
    return [list(optimizer.rates) for optimizer in optimizers(recording) or ()]


def _listed(rates: list[list[float]]) -> str:
    """Return the learning rates of all groups in words."""
    return " and ".join(f"{rate:g}" for own in rates for rate in own)


def optimizer(facts: FirstParting) -> PartingCause | None:
    """The cause if updates differ by different factors."""
    if facts.first.same.kind != "update":
        return None
    parted, all_of = facts.parted("update"), facts.compared("update")
    a, b = (_types(recording) for recording in (facts.comparison.a, facts.comparison.b))
    headline = "another optimizer, or other settings of it"
    if a and b:
        headline = (
            f"another optimizer: {a} in A, {b} in B"
            if a != b
            else f"other settings of the optimizer, {a}"
        )
    return PartingCause(
        "optimizer",
        headline,
        f"at step {facts.step} parameters, forward and gradients are {facts.equal_before()}, and "
        f"{len(parted)} of {counted(len(all_of), 'update')} differ, not by one factor",
    )


def _types(recording: Recording) -> str:
    return ", ".join(optimizer.type for optimizer in optimizers(recording) or ())
