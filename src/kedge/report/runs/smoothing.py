"""The smoothing of curves: an exponential moving average, as TensorBoard has it."""

from __future__ import annotations

import numpy as np

from kedge.store.rows import Floats

#: The share of an average that is kept at each value, for the figures of tables.
KEPT = 0.9


def smoothed(values: Floats, kept: float = KEPT) -> Floats:
    """Return the average of each value and those before it, each weighted by its distance; NaN where a value is not finite.

    The weights of the first values add up to 1 too, so that the average does not begin at zero.

    Args:
        values: The values.
        kept: The share of the average that is kept at each further value; 0 leaves the values as
            they are.
    """
    made = np.full(len(values), np.nan)
    total, weight = 0.0, 0.0
    for place in np.flatnonzero(np.isfinite(values)).tolist():
        total = total * kept + float(values[place]) * (1 - kept)
        weight = weight * kept + (1 - kept)
        made[place] = total / weight
    return made
