"""Causes in modules that compute differently in training: their mode, and what they drop."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt

import numpy as np

from kedge.compare.alignment.modules import RecordedModule, flow
from kedge.compare.alignment.sites import SameModule, SameSite
from kedge.compare.causes_in_forward import RANDOM
from kedge.compare.first_parting import FirstParting, PartingCause
from kedge.compare.wording import name_of_module, names_of_modules
from kedge.rules.recorded.optimizers import events_of
from kedge.short_text import counted
from kedge.store.events import ModesEvent
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL, Ints

#: The number of dimensions, from the first on, that a module drops values of one by one; the first
#: one for all others.
DROPS_SINGLY = {"Dropout": None, "Dropout1d": 2, "Dropout2d": 2, "Dropout3d": 2}
#: Shares of dropped values differ by chance; this number of standard deviations is allowed.
DEVIATIONS = 6
#: A share is nothing, or everything, up to this.
EDGE = 1e-3


def mode(facts: FirstParting) -> PartingCause | None:
    """The cause if the first module to differ is in evaluation mode in one run alone."""
    same = facts.first.same
    a = _modes_at(facts.comparison.a, same.a.root, facts.step)
    b = _modes_at(facts.comparison.b, same.b.root, facts.step)
    if same.kind != "out" or a is None or b is None:
        return None
    modes = _modes(same.module, a, b)
    if modes is None:
        return None
    modules = facts.comparison.alignment.modules
    changed = [each.a for each in modules if _modes(each, a, b) == modes]
    if a.training != b.training:
        who = "the model is"
    elif len(changed) == 1:
        who = f"{names_of_modules(changed)} is"
    else:
        who = f"{names_of_modules(changed)} are"
    return PartingCause(
        "mode",
        f"another mode: {who} in {modes[0]} mode in A, in {modes[1]} mode in B",
        f"{name_of_module(same.module.a)} is the first to differ, at step {facts.step}, and "
        f"everything before it is {facts.equal_before()}",
    )


def _modes_at(recording: Recording, root: int, step: int) -> ModesEvent | None:
    """Return the modes of a root in a step: the last note until then.

    Without one it is the first, which is made with the optimizer.
    """
    notes = [note for note in events_of(recording, ModesEvent) if note.root == root]
    until_then = [note for note in notes if note.step <= step]
    chosen = until_then[-1:] or notes[:1]
    return next(iter(chosen), None)


def _modes(module: SameModule, a: ModesEvent, b: ModesEvent) -> tuple[str, str] | None:
    """Return the modes of a module in A and in B.

    None is returned if they are equal, or one of them was not noted.
    """
    one = _mode(module.a, a)
    other = _mode(module.b, b)
    if one is None or other is None or one == other:
        return None
    return one, other


def _mode(module: RecordedModule, note: ModesEvent) -> str | None:
    if module.path in note.eval:
        return "evaluation"
    if module.path in note.train:
        return "training"
    return None


def dropping(facts: FirstParting) -> PartingCause | None:
    """The cause if the first module to differ drops another share of its values."""
    first = facts.first.same
    if first.kind != "out":
        return None
    shares = _dropped_otherwise(facts, first)
    if shares is None:
        return None
    a, b = shares
    modules: dict[RecordedModule, None] = {}
    for same in facts.sites:
        if same.kind != "out" or same.module.a.type != first.module.a.type:
            continue
        if same is first or _dropped_otherwise(facts, same) is not None:
            modules[same.module.a] = None
    who = f"{names_of_modules(list(modules))} drop"
    if len(modules) == 1:
        who += "s"

    steps = counted(len(facts.comparison.steps) - facts.column, "step")
    evidence = f"as measured in {steps}; everything before is {facts.equal_before()}"
    if min(a, b) < EDGE:
        side = "A" if a < b else "B"
        evidence += f"; in {side} its rate is 0, or it is in evaluation mode"
    return PartingCause(
        "dropout",
        f"another dropout rate: {who} {_named(a)} in A, {_named(b)} in B",
        evidence,
    )


def _named(share: float) -> str:
    if share < EDGE:
        return "nothing"
    if share > 1 - EDGE:
        return "everything"
    return f"about {share:.0%}".replace("%", " %")


def _dropped_otherwise(
    facts: FirstParting,
    same: SameSite,
) -> tuple[float, float] | None:
    """Return the shares that a module drops in A and in B.

    None is returned if they may differ by chance, or if it drops nothing.
    """
    if not RANDOM.search(same.module.a.type) or not same.module.kept:
        return None
    steps = facts.comparison.steps[facts.column :]
    a = _Dropped.of(facts.comparison.a, same.a, steps)
    b = _Dropped.of(facts.comparison.b, same.b, steps)
    if a is None or b is None:
        return None
    both = (a.share * a.units + b.share * b.units) / (a.units + b.units)
    chance = sqrt(max(both * (1 - both), 0.0) * (1 / a.units + 1 / b.units))
    if abs(a.share - b.share) <= max(DEVIATIONS * chance, EDGE):
        return None
    return a.share, b.share


@dataclass(frozen=True)
class _Dropped:
    """The share of its inputs that a module dropped, and the number of values that it drew that for."""

    share: float
    units: float

    @staticmethod
    def of(recording: Recording, out: SiteInfo, steps: Ints) -> _Dropped | None:
        """Return what a module dropped in some steps; None if that was not measured."""
        given = _input(recording, out)
        if given is None:
            return None
        before = recording.rows(given)
        after = recording.rows(out)
        common, i, j = np.intersect1d(
            before.step, after.step, assume_unique=True, return_indices=True
        )
        chosen = np.isin(common, steps) & (before.level[i] == FULL) & (after.level[j] == FULL)
        alive = 1 - before.statistic("zero")[i][chosen]
        left = 1 - after.statistic("zero")[j][chosen]
        known = np.isfinite(alive) & np.isfinite(left) & (alive > 0)
        if not known.any():
            return None
        total = float(alive[known].sum())
        share = 1 - float(left[known].sum()) / total
        units = prod(out.shape[: DROPS_SINGLY.get(out.type, 1)])
        return _Dropped(min(max(share, 0.0), 1.0), max(units * total, 1.0))


def _input(recording: Recording, out: SiteInfo) -> SiteInfo | None:
    """Return the first input of a call of a module, given its output; None if it is not recorded."""
    call = out.site.rpartition(":")[0]
    for site in recording.sites:
        is_input = site.path == out.path and flow(site) == "in"
        if is_input and site.site.rpartition(":")[0] == call:
            return site
    return None
