"""The sizes of values in A and in B, and their ratios as base-2 logarithms."""

from __future__ import annotations

import numpy as np

from kedge.compare.comparison import Comparison
from kedge.store.rows import Floats


def scales(comparison: Comparison) -> tuple[Floats, Floats]:
    """Return the root mean squares in A and in B.

    Returns:
        Two matrices with a line for each aligned site and a column for each step, NaN where the
        site was not compared or not measured.
    """
    both = np.full((2, *comparison.apart.shape), np.nan)
    for i, same in enumerate(comparison.alignment.sites):
        columns = np.flatnonzero(~np.isnan(comparison.apart[i]))
        steps = comparison.steps[columns]
        for side, rows in enumerate((comparison.a.rows(same.a), comparison.b.rows(same.b))):
            both[side, i, columns] = rows.statistic("rms")[np.searchsorted(rows.step, steps)]
    return both[0], both[1]


def log_ratios(comparison: Comparison) -> Floats:
    """Return the logarithm of the ratio of the root mean squares at every site in every step.

    Returns:
        A matrix as of :func:`scales`: 0 where they are equal, 1 where B is twice A, infinite where
        only one is zero, NaN where one is non-finite.
    """
    a, b = scales(comparison)
    known = np.isfinite(a) & np.isfinite(b)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log2(b) - np.log2(a)
    logs[(a == b) & known] = 0.0
    logs[~known] = np.nan
    return np.asarray(logs)
