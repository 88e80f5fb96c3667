"""Signs in the steps before a birth that the optimizer's steps were too large."""

from __future__ import annotations

import numpy as np

from kedge.rules.nonfinite.bad_steps import TOTAL
from kedge.store.recording import Recording, Rows

#: A parameter of this many times its first size, or a gradient of this many times its usual one,
#: has diverged.
GROWN = 1e3

#: The growth of parameters that begin below this size means nothing.
SMALL = 1e-6

#: The share of a weight's size by which one step may change it; the tenth of UPDATE-RATIO holds for
#: many.
_LONG = 0.5

LOWER = "lower the learning rate or warm it up, and clip gradients. "
_LONG_STEPS = (
    "The optimizer's steps may be too large: that of step {step}, the last measured one before, changed {path} by "
    "{ratio:.2g} times its size; " + LOWER
)
_RISEN = (
    "The run had diverged before: the norm of all gradients had gone from {was:.2g} to {now:.2g} at step {step}; "
    + LOWER
)


def long_step_signs(recording: Recording, step: int) -> str:
    """Return a sentence about signs of too large steps before a step; empty if there are none."""
    return _risen(recording, step) or _long(recording, step)


def _risen(recording: Recording, step: int) -> str:
    """Return a sentence about gradients that had grown a thousandfold when they were last finite; empty if there are none."""
    for site in recording.of_kind(TOTAL):
        rows = recording.rows(site)
        until = np.flatnonzero(rows.clean & (rows.step < step))
        norms = np.sqrt(rows.sumsq[until])
        if len(norms) > 1 and 0 < GROWN * np.median(norms[:-1]) < norms[-1]:
            return _RISEN.format(
                was=np.median(norms[:-1]), now=norms[-1], step=int(rows.step[until[-1]])
            )
    return ""


def _long(recording: Recording, step: int) -> str:
    """Return a sentence about a weight that the last measured step before changed by far too much; empty if there is none."""
    steps, found = recording.steps[recording.steps < step], []
    params = {site.path: site for site in recording.of_kind("param") if len(site.shape) > 1}
    for site in recording.of_kind("update") if len(steps) else ():
        param = params.get(site.path)
        # Any later size of a weight that began at zero is large relative to zero.
        if param is not None and (recording.rows(param).statistic("rms")[:1] > SMALL).all():
            size, change = (rms_at(recording.rows(each), int(steps[-1])) for each in (param, site))
            if size > 0 and np.isfinite(change / size):
                found.append((change / size, param.path))
    ratio, path = max(found, default=(0.0, ""))
    return _LONG_STEPS.format(path=path, ratio=ratio, step=int(steps[-1])) if ratio > _LONG else ""


def rms_at(rows: Rows, step: int) -> float:
    """Return the rms of the row of one step; NaN if there is none."""
    at = np.flatnonzero(rows.step == step)
    return float(rows.statistic("rms")[at[0]]) if len(at) else np.nan
