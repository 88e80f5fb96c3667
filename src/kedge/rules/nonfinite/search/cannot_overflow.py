"""Modules that cannot have made a non-finite value, by their kind and the size of their figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import numpy as np

from kedge.rules.nonfinite.bad_steps import BadStep
from kedge.rules.recorded.wiring import ModuleSites, Wiring
from kedge.store.formats import FORMATS

#: Modules that only add products of their input with their weights, forward and backward, or pass
#: their input on.
_SUMS = re.compile(r"(Lazy)?(Linear|Conv(Transpose)?\dd)$")
_PASSING = re.compile(r"(ReLU6?|Identity|Flatten|Unflatten)$")

#: The factor by which a bound on the sums has to stay below the largest number of the format.
_ROOM = 1e3


def backward_cannot_overflow(wiring: Wiring, bad_step: BadStep, module: ModuleSites) -> bool:
    """Whether a module's backward cannot have made a non-finite value, by its kind and the size of its figures."""
    if not bad_step.full or not bad_step.are_finite(module.grads) or not _of_torch(wiring, module):
        return False
    if _PASSING.match(module.type):
        return True
    if not _SUMS.match(module.type) or not module.params:
        return False
    return _fits(
        wiring, bad_step, module, module.grads, (*module.grads, *module.params, *module.ins)
    )


def forward_cannot_overflow(wiring: Wiring, bad_step: BadStep, module: ModuleSites) -> bool:
    """Whether a module's forward cannot have made a non-finite value, if its input had the recorded figures."""
    entries = {source for site in module.ins for source in _origins(wiring, bad_step, site)}
    if not entries or None in entries or not _SUMS.match(module.type) or not module.params:
        return False
    given = [site for site in entries if site is not None]
    return _of_torch(wiring, module) and _fits(
        wiring, bad_step, module, given, (*given, *module.params, *module.outs)
    )


def _origins(wiring: Wiring, bad_step: BadStep, site: int) -> Iterable[int | None]:
    """Return the sites with an input's figures: itself, or the outputs that it is in other steps."""
    return wiring.sites[site].sources if site in bad_step.inferred else (site,)


def _of_torch(wiring: Wiring, module: ModuleSites) -> bool:
    file = str(wiring.described.get(module.path, {}).get("file")).replace("\\", "/")
    return "/torch/nn/modules/" in file


def _fits(
    wiring: Wiring,
    bad_step: BadStep,
    module: ModuleSites,
    given: Iterable[int],
    formed: Iterable[int],
) -> bool:
    """Whether all sums of products of some values with a module's weights stay far within all formats."""
    known = [FORMATS.get(wiring.sites[site].dtype) for site in formed]
    arrived = max(_norm(wiring, site, bad_step.step) for site in given)
    weights = max(_norm(wiring, site, bad_step.step) for site in module.params)
    ends = [form.largest for form in known if form is not None]
    # No sum of products is larger than the product of the two norms; the bias is added as if it met
    # a one.
    return len(ends) == len(known) and max(arrived, 1.0) * weights * _ROOM < min(ends)


def _norm(wiring: Wiring, site: int, step: int) -> float:
    rows = wiring.recording.rows(wiring.sites[site])
    at = np.flatnonzero(rows.step == step)
    size = math.sqrt(rows.sumsq[at[0]]) if len(at) else math.inf
    return size if math.isfinite(size) else math.inf
