"""The losses of a recording: the values that backward was called on, or else single numbers that roots return."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kedge.frames import SourceLine
from kedge.rules.recorded.course import Course
from kedge.rules.recorded.once import once
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.roots import root_paths
from kedge.store.events import LossGraphEvent, LossOperationEvent
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Bools, Floats, Ints, Rows

#: The kind of the site of the values that one line of the program calls backward on.
LOSS = "loss"

#: Of a normal distribution: the standard error of a median, in those of a mean, and its standard
#: deviation, in median absolute deviations.
_MEDIAN, _DEVIATION = 1.2533, 1.4826

#: The least error, so that a loss without noise can be compared.
_LEAST = 1e-12

#: Least values in a quarter whose median says something.
_QUARTER = 10


@dataclass(frozen=True)
class Loss(Course):
    """One loss in the whole steps in which it was finite.

    The values are means over the calls of a step. Steps with fewer or more calls than usual, such
    as the last one of a GAN or of an epoch, are left out: their mean is of something else.

    Attributes:
        rows: Everything that was recorded of it.
    """

    rows: Rows

    @property
    def ends_badly(self) -> bool:
        """Whether the last recorded loss was not finite."""
        return not bool(self.rows.clean[-1])


def ascending(recording: Recording) -> set[str]:
    """Return the sites of the losses that the program makes large."""
    graphs = events_of(recording, LossGraphEvent)
    return {graph.site for graph in graphs if graph.ascends}


@once
def losses(recording: Recording) -> tuple[Loss, ...]:
    """Return the losses of a recording that have any rows."""
    found = [site for site in recording.of_kind(LOSS) if len(recording.rows(site))]
    if not found:
        outputs = recording.of_kind("out")
        found = [site for site in outputs if is_single_output(recording, site)]
    made = []
    for site in found:
        rows = recording.rows(site)
        if len(rows):
            values = rows.statistic("mean")
            kept = whole_steps(rows.calls) & rows.clean & np.isfinite(values)
            made.append(Loss(site, rows.step, values, rows).where(kept))
    return tuple(made)


def wavers(values: Floats, least: int = 20, share: float = 0.05) -> bool:
    """Whether a loss changes its sign again and again, as that of a policy does, which is no measure of learning.

    Args:
        values: The loss.
        least: The number of values that are too few to say.
        share: Of the steps.
    """
    changes = np.count_nonzero(np.diff(np.signbit(values)))
    return len(values) > least and bool(changes > share * len(values))


def noise_of(values: Floats) -> float:
    """Return the standard deviation of a loss around its trend, by the differences between neighbours."""
    return float(_DEVIATION * np.median(np.abs(np.diff(values))) / math.sqrt(2))


def fall(before: Floats, after: Floats, noise: float) -> float:
    """Return by how many standard errors the median of some values is above that of later ones."""
    error = _MEDIAN * noise * math.sqrt(1 / len(before) + 1 / len(after))
    return float((np.median(before) - np.median(after)) / max(error, _LEAST))


def still_falls(recording: Recording, sure: float = 3.0) -> bool:
    """Whether every loss was still falling at the end of the run.

    Then the last quarter of its values is below the quarter before, by more than some standard
    errors. A loss of few values is not known to.
    """
    known = losses(recording)
    for loss in known:
        quarter = len(loss.values) // 4
        if quarter < _QUARTER or loss.ends_badly:
            return False
        before, last = loss.values[-2 * quarter : -quarter], loss.values[-quarter:]
        if fall(before, last, noise_of(loss.values)) <= sure:
            return False
    return bool(known)


def steps_with_little_loss(recording: Recording, share: float) -> Ints:
    """Return the steps in which every loss was below a share of its first values; none if one of them crosses zero."""
    known = [loss for loss in losses(recording) if len(loss.values)]
    if not known or any(float(loss.values.min()) < 0 for loss in known):
        return np.zeros(0, dtype=np.int64)
    little = []
    for loss in known:
        first = float(np.median(loss.values[:5]))
        little.append(loss.steps[loss.values < share * first])
    found = little[0]
    for steps in little[1:]:
        found = np.intersect1d(found, steps)
    return found


def steps_without_loss(recording: Recording) -> Ints:
    """Return the steps in which every loss was exactly zero, like a hinge loss that every sample has passed."""
    rows = [loss.rows for loss in losses(recording)]
    if not rows:
        return np.zeros(0, dtype=np.int64)
    steps = np.concatenate([r.step for r in rows])
    zero = np.concatenate([r.clean & (r.statistic("mean") == 0) for r in rows])
    return np.setdiff1d(steps, steps[~zero])


def is_single_output(recording: Recording, site: SiteInfo) -> bool:
    """Whether a site is the output of a root, and a single number."""
    is_of_root = site.kind == "out" and site.path in root_paths(recording)
    return is_of_root and math.prod(site.shape) == 1


def maker_at(
    recording: Recording, site: SiteInfo, step: int
) -> tuple[str | None, SourceLine | None]:
    """Return the autograd node of a loss in one step, and the line that called backward on it.

    The site itself describes the first step alone. The node is None where it is not known, as where
    the backward passes of the step began at results of several operations.
    """
    made = (site.node, site.source)
    before = [made]
    for event in events_of(recording, LossOperationEvent):
        if event.step > step or event.loss not in (None, site.site):
            continue
        made = (event.node, event.source or site.source)
        before = [*before, made] if event.step == step else [made]
    rows = recording.rows(site)
    calls = rows.calls[rows.step == step]
    nodes = {node for node, _ in before}
    is_one = len(nodes) == 1 or not (calls > 1).any()
    if is_one:
        return made
    return (None, made[1])


def whole_steps(amounts: Ints) -> Bools:
    """Return which steps have the usual number of calls or elements; all, if most steps differ."""
    usual = np.zeros(0, dtype=bool)
    if len(amounts):
        usual = np.asarray(amounts == np.median(amounts))
    if usual.sum() > len(amounts) / 2:
        return usual
    return np.ones(len(amounts), dtype=bool)
