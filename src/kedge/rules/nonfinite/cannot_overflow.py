"""What a module cannot have made, by its kind and by the size of its figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import numpy as np

from kedge.rules.nonfinite.bad_steps import Moment
from kedge.rules.wiring import Module, Wiring
from kedge.store.formats import FORMATS

#: Modules that only add products of what arrives with their weights, forward and backward, or pass on what arrives.
_SUMS = re.compile(r"(Lazy)?(Linear|Conv(Transpose)?\dd)$")
_PASSING = re.compile(r"(ReLU6?|Identity|Flatten|Unflatten)$")

#: How far below the end of the format a bound on the sums has to stay.
_ROOM = 1e3


def innocent(wiring: Wiring, moment: Moment, module: Module) -> bool:
    """Tell whether a module's backward cannot have left the finite numbers, by its kind and by the size of its figures."""
    if not moment.full or not moment.finite(module.grads) or not _of_torch(wiring, module):
        return False
    if _PASSING.match(module.type):
        return True
    if not _SUMS.match(module.type) or not module.params:
        return False
    return _fits(wiring, moment, module, module.grads, (*module.grads, *module.params, *module.ins))


def contained(wiring: Wiring, moment: Moment, module: Module) -> bool:
    """Tell whether a module's forward cannot have left the finite numbers, if what went in is what its figures say."""
    entries = {source for site in module.ins for source in _origins(wiring, moment, site)}
    if not entries or None in entries or not _SUMS.match(module.type) or not module.params:
        return False
    given = [site for site in entries if site is not None]
    return _of_torch(wiring, module) and _fits(wiring, moment, module, given, (*given, *module.params, *module.outs))


def _origins(wiring: Wiring, moment: Moment, site: int) -> Iterable[int | None]:
    """Give the sites of which an input's figures are: its own, or the outputs that it is in other steps."""
    return wiring.sites[site].sources if site in moment.worked else (site,)


def _of_torch(wiring: Wiring, module: Module) -> bool:
    file = str(wiring.described.get(module.path, {}).get("file")).replace("\\", "/")
    return "/torch/nn/modules/" in file


def _fits(wiring: Wiring, moment: Moment, module: Module, given: Iterable[int], formed: Iterable[int]) -> bool:
    """Tell whether all sums of products of some values with a module's weights stay far within all formats."""
    known = [FORMATS.get(wiring.sites[site].dtype) for site in formed]
    arrived = max(_norm(wiring, site, moment.step) for site in given)
    weights = max(_norm(wiring, site, moment.step) for site in module.params)
    ends = [form.largest for form in known if form is not None]
    # No sum of products is larger than the product of the two norms; the bias is added as if it met a one.
    return len(ends) == len(known) and max(arrived, 1.0) * weights * _ROOM < min(ends)


def _norm(wiring: Wiring, site: int, step: int) -> float:
    rows = wiring.recording.rows(wiring.sites[site])
    at = np.flatnonzero(rows.step == step)
    size = math.sqrt(rows.sumsq[at[0]]) if len(at) else math.inf
    return size if math.isfinite(size) else math.inf
