"""The course of a site's scale over the steps, and the small picture of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kedge.store.recording import Recording, SiteInfo

BLOCKS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "✗"
ZERO = "0"
GAP = " "

#: A picture is at least this many powers of ten high, so that noise does not look like a change.
LEAST_DECADES = 1.0


@dataclass(frozen=True, eq=False)
class Course:
    """How large a site's values were over the sampled steps.

    Attributes:
        rms: One value for each sampled step, NaN where there is none.
        broken: Where something was not finite, at that step or before the next sampled one.
        last: The newest value; NaN or infinite where the newest was not finite.
        broken_steps: In how many steps something was not finite, off-schedule steps included.
        since: Whether something was not finite after the last sampled step.
    """

    rms: NDArray[np.float64]
    broken: NDArray[np.bool_]
    last: float | None
    broken_steps: int
    since: bool = False


def course(recording: Recording, site: SiteInfo) -> Course:
    """Follow the scale of one site through a recording."""
    rows, rms = recording.rows(site), recording.series(site, "rms")
    bad = ~rows.clean & (rows.count > 0)
    broken = np.zeros(len(rms), dtype=bool)
    if len(rms):
        before = np.searchsorted(recording.steps, rows.step[bad], side="right") - 1
        broken[np.maximum(before, 0)] = True
    since = bool(len(rms) and bad.any() and rows.step[bad][-1] > recording.steps[-1])
    return Course(rms, broken, _last(rms, bad), int(bad.sum()), since)


def _last(rms: NDArray[np.float64], bad: NDArray[np.bool_]) -> float | None:
    present = rms[~np.isnan(rms)]
    if len(bad) and bad[-1]:
        return float("inf") if len(rms) and np.isinf(rms[-1]) else float("nan")
    return float(present[-1]) if len(present) else None


def picture(followed: Course, width: int) -> str:
    """Draw a course in one line of blocks, on a logarithmic scale of its own.

    Each character is the largest of its steps; steps with something that is not finite are
    crosses, steps of nothing but zeros are ``0``, and steps without a value are gaps.
    """
    values, broken = _binned(followed, width)
    with np.errstate(divide="ignore"):
        logs = np.log10(values)
    drawn = np.isfinite(logs) & ~broken
    cells = np.where(values == 0, ZERO, GAP).astype(object)
    cells[drawn] = [BLOCKS[level] for level in _levels(logs[drawn])]
    cells[broken] = NOT_FINITE
    return "".join(cells)


def _levels(logs: NDArray[np.float64]) -> list[int]:
    if not len(logs):
        return []
    low, high, top = logs.min(), logs.max(), len(BLOCKS) - 1
    if high - low >= LEAST_DECADES:
        heights = (logs - low) / (high - low) * top
    else:
        # The middle is a block's own height: half a block up and down is still a flat line.
        heights = (logs - (low + high) / 2) / LEAST_DECADES * top + top // 2
    return [int(level) for level in np.rint(heights)]


def _binned(followed: Course, width: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    count = len(followed.rms)
    if count <= width:
        return followed.rms, followed.broken
    starts = np.arange(width) * count // width
    return np.fmax.reduceat(followed.rms, starts), np.logical_or.reduceat(followed.broken, starts)
