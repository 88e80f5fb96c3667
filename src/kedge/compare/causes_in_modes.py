"""Causes in modules that compute differently in training: their mode, and the share of values that they drop."""

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
    """The cause if the first module to differ is in evaluation mode in one run, and in training mode in the other."""
    same = facts.first.same
    a, b = (_modes_at(recording, site.root, facts.step) for recording, site in _sides(facts, same))
    if same.kind != "out" or a is None or b is None:
        return None
    modes = _modes(same.module, a, b)
    if modes is None:
        return None
    if a.training != b.training:
        who = "the model is"
    else:
        changed = [
            each.a for each in facts.comparison.alignment.modules if _modes(each, a, b) == modes
        ]
        who = f"{names_of_modules(changed)} {'is' if len(changed) == 1 else 'are'}"
    return PartingCause(
        "mode",
        f"another mode: {who} in {modes[0]} mode in A, in {modes[1]} mode in B",
        f"{name_of_module(same.module.a)} is the first to differ, at step {facts.step}, and "
        f"everything before it is {facts.equal_before()}",
    )


def _sides(
    facts: FirstParting, same: SameSite
) -> tuple[tuple[Recording, SiteInfo], tuple[Recording, SiteInfo]]:
    return (facts.comparison.a, same.a), (facts.comparison.b, same.b)


def _modes_at(recording: Recording, root: int, step: int) -> ModesEvent | None:
    """Return the modes of a root in a step: the last note until then, or the first, which is made with the optimizer."""
    notes = [note for note in events_of(recording, ModesEvent) if note.root == root]
    return next((note for note in reversed(notes) if note.step <= step), next(iter(notes), None))


def _modes(module: SameModule, a: ModesEvent, b: ModesEvent) -> tuple[str, str] | None:
    """Return the modes of a module in A and in B; None if they are equal, or one of them was not noted."""
    one, other = _mode(module.a, a), _mode(module.b, b)
    return (one, other) if one is not None and other is not None and one != other else None


def _mode(module: RecordedModule, note: ModesEvent) -> str | None:
    if module.path in note.eval:
        return "evaluation"
    return "training" if module.path in note.train else None


def dropping(facts: FirstParting) -> PartingCause | None:
    """The cause if the first module to differ drops another share of its values."""
    first = facts.first.same
    shares = _dropped_otherwise(facts, first) if first.kind == "out" else None
    if shares is None:
        return None
    a, b = shares
    others = [
        same
        for same in facts.sites
        if same.kind == "out" and same.module.a.type == first.module.a.type
    ]
    changed = [
        same.module.a
        for same in others
        if same is first or _dropped_otherwise(facts, same) is not None
    ]
    modules = list(dict.fromkeys(changed))
    steps = counted(len(facts.comparison.steps) - facts.column, "step")
    evidence = f"as measured in {steps}; everything before is {facts.equal_before()}"
    if min(a, b) < EDGE:
        evidence += f"; in {'A' if a < b else 'B'} its rate is 0, or it is in evaluation mode"
    return PartingCause(
        "dropout",
        f"another dropout rate: {names_of_modules(modules)} {'drops' if len(modules) == 1 else 'drop'} "
        f"{_named(a)} in A, {_named(b)} in B",
        evidence,
    )


def _named(share: float) -> str:
    if share < EDGE:
        return "nothing"
    return "everything" if share > 1 - EDGE else f"about {share:.0%}".replace("%", " %")


def _dropped_otherwise(facts: FirstParting, same: SameSite) -> tuple[float, float] | None:
    """Return the shares that a module drops in A and in B; None if they may differ by chance, or it drops nothing."""
    if not RANDOM.search(same.module.a.type) or not same.module.kept:
        return None
    found = [
        _Dropped.of(recording, site, facts.comparison.steps[facts.column :])
        for recording, site in _sides(facts, same)
    ]
    a, b = found
    if a is None or b is None:
        return None
    both = (a.share * a.units + b.share * b.units) / (a.units + b.units)
    chance = sqrt(max(both * (1 - both), 0.0) * (1 / a.units + 1 / b.units))
    return (a.share, b.share) if abs(a.share - b.share) > max(DEVIATIONS * chance, EDGE) else None


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
        before, after = recording.rows(given), recording.rows(out)
        common, i, j = np.intersect1d(
            before.step, after.step, assume_unique=True, return_indices=True
        )
        chosen = np.isin(common, steps) & (before.level[i] == FULL) & (after.level[j] == FULL)
        alive, left = (
            1 - rows.statistic("zero")[where][chosen] for rows, where in ((before, i), (after, j))
        )
        known = np.isfinite(alive) & np.isfinite(left) & (alive > 0)
        if not known.any():
            return None
        singly = DROPS_SINGLY.get(out.type, 1)
        units = prod(out.shape if singly is None else out.shape[:singly])
        share = 1 - float(left[known].sum() / alive[known].sum())
        return _Dropped(min(max(share, 0.0), 1.0), max(units * float(alive[known].sum()), 1.0))


def _input(recording: Recording, out: SiteInfo) -> SiteInfo | None:
    """Return the first input of a call of a module, given its output; None if it is not recorded."""
    call = out.site.rpartition(":")[0]
    inputs = (site for site in recording.sites if site.path == out.path and flow(site) == "in")
    return next((site for site in inputs if site.site.rpartition(":")[0] == call), None)
