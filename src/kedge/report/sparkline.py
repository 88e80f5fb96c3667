"""The scale of a site over the steps, and its picture as a line of blocks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.store.recording import Recording, SiteInfo

BLOCKS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "✗"
ZERO = "0"
GAP = " "

#: The least height of a picture in powers of ten, so that noise does not look like a change.
LEAST_DECADES = 1.0


@dataclass(frozen=True, eq=False)
class ScaleSeries:
    """The scale of a site's values over the measured steps.

    Attributes:
        rms: One value for each measured step, NaN where there is none.
        broken: Whether a value was non-finite, at that step or before the next measured one.
        last: The newest value; NaN or infinite if it was non-finite.
        broken_steps: The number of steps with non-finite values, light steps included.
        since: Whether a value was non-finite after the last measured step.
    """

    rms: NDArray[np.float64]
    broken: NDArray[np.bool_]
    last: float | None
    broken_steps: int
    since: bool = False


def scale_series(recording: Recording, site: SiteInfo) -> ScaleSeries:
    """Return the scale of one site over the steps of a recording."""
    rows, rms = recording.rows(site), recording.series(site, "rms")
    bad = ~rows.clean & (rows.count > 0)
    broken = np.zeros(len(rms), dtype=bool)
    if len(rms):
        before = np.searchsorted(recording.steps, rows.step[bad], side="right") - 1
        broken[np.maximum(before, 0)] = True
    since = bool(len(rms) and bad.any() and rows.step[bad][-1] > recording.steps[-1])
    return ScaleSeries(rms, broken, _last(rms, bad), int(bad.sum()), since)


def _last(rms: NDArray[np.float64], bad: NDArray[np.bool_]) -> float | None:
    present = rms[~np.isnan(rms)]
    if len(bad) and bad[-1]:
        return float("inf") if len(rms) and np.isinf(rms[-1]) else float("nan")
    return float(present[-1]) if len(present) else None


def median_series(several: Sequence[ScaleSeries]) -> ScaleSeries | None:
    """Return the median scale of several sites in each step; None without a site."""
    if not several:
        return None
    with warnings.catch_warnings(action="ignore"):  # of a step in which none has a value
        rms = np.nanmedian([series.rms for series in several], axis=0)
    broken = np.logical_or.reduce([series.broken for series in several])
    newest = [series.last for series in several if series.last is not None]
    last = float(np.median(newest)) if newest else None
    most = max(series.broken_steps for series in several)
    return ScaleSeries(rms, broken, last, most, any(series.since for series in several))


def sparkline(series: ScaleSeries, width: int, ends: tuple[float, float] | None = None) -> str:
    """Return a series as one line of blocks, on a logarithmic scale: from one value to another, or its own if None.

    Each character is the largest of its steps; steps with non-finite values are crosses, steps
    with only zeros are ``0``, and steps without a value are gaps.
    """
    values, broken = _binned(series, width)
    with np.errstate(divide="ignore"):
        logs = np.log10(values)
    drawn = np.isfinite(logs) & ~broken
    cells = np.where(values == 0, ZERO, GAP).astype(object)
    cells[drawn] = [BLOCKS[level] for level in _levels(logs[drawn], ends)]
    cells[broken] = NOT_FINITE
    return "".join(cells)


def _levels(logs: NDArray[np.float64], ends: tuple[float, float] | None) -> list[int]:
    if not len(logs):
        return []
    low, high = (logs.min(), logs.max()) if ends is None else np.log10(ends)
    top = len(BLOCKS) - 1
    if high - low >= LEAST_DECADES:
        heights = (logs - low) / (high - low) * top
    else:
        # Centred on a block: half a block up or down is still a flat line.
        heights = (logs - (low + high) / 2) / LEAST_DECADES * top + top // 2
    return [int(level) for level in np.rint(heights)]


def _binned(series: ScaleSeries, width: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    return binned(series.rms, width), binned(series.broken, width, np.logical_or)


def binned(values: NDArray[Any], width: int, fold: np.ufunc = np.fmax) -> NDArray[Any]:
    """Return at most so many values, each the fold of neighbouring ones: by default the largest of them."""
    if len(values) <= width:
        return values
    return np.asarray(fold.reduceat(values, np.arange(width) * len(values) // width))
