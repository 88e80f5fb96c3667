"""Histograms of magnitudes, counted by numpy's own functions of floats and not by their bits."""

from __future__ import annotations

import numpy as np

from kedge.store.exponents import BUCKETS, LOWEST, SMALLEST_NORMAL


def count(values: np.ndarray) -> np.ndarray:
    """Count the finite non-zero elements of each row by their power of two, shape ``(rows, 83)``."""
    rows = len(values)
    magnitude = np.abs(values)
    counted = (magnitude > 0) & np.isfinite(magnitude)
    # frexp gives a mantissa in [0.5, 1), so its exponent is one more than floor(log2(abs(x))).
    power = np.frexp(np.where(counted, magnitude, 1))[1].astype(np.int64) - 1
    bucket = np.clip(power - LOWEST + 2, 1, BUCKETS - 1)
    bucket[power < SMALLEST_NORMAL] = 0
    place = bucket + BUCKETS * np.arange(rows)[:, None]
    return (
        np.bincount(place[counted], minlength=rows * BUCKETS)
        .reshape(rows, BUCKETS)
        .astype(np.int64)
    )
