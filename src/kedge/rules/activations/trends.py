"""The scale of what layers return, and how steadily it grows or shrinks."""

from __future__ import annotations

import numpy as np

from kedge.rules.recorded.once import once
from kedge.rules.recorded.weights import weights
from kedge.rules.recorded.wiring import wire
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Floats, Ints

#: The most points of which all pairs are looked at.
_MOST_POINTS = 1000


@once
def outputs_of_weights(recording: Recording) -> list[SiteInfo]:
    """Return the outputs of the modules that have a weight, in the order in which they return."""
    modules = wire(recording).modules
    found = [weight.param.owner for weight in weights(recording) if not weight.table]
    owners = [modules[owner] for owner in dict.fromkeys(found)]
    return [recording.sites[module.outs[0]] for module in owners if module.outs]


def log2(scales: Floats) -> Floats:
    """Return base-2 logarithms: -inf for zero, NaN for NaN."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log2(scales))


def theil_sen(x: Floats | Ints, y: Floats) -> float:
    """Return the median of the slopes between all pairs of points, which no outlier moves.

    Of more than a thousand points, a thousand evenly spread ones count: ten thousand have fifty
    million pairs.
    """
    if len(x) > _MOST_POINTS:
        kept = np.linspace(0, len(x) - 1, _MOST_POINTS).astype(np.int64)
        x, y = x[kept], y[kept]
    i, j = np.triu_indices(len(x), k=1)
    if not len(i):
        return 0.0
    return float(np.median((y[j] - y[i]) / (x[j] - x[i])))
