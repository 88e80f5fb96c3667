"""SCALE-DRIFT: the scale of activations over the steps of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.rules.activations.trends import log2, outputs_of_weights, theil_sen
from kedge.rules.evidence import Evidence, places, said, unsaid
from kedge.rules.naming import NAMED, plain
from kedge.rules.recorded.course import Course
from kedge.rules.recorded.roots import by_root
from kedge.rules.recorded.samples import measured, too_few
from kedge.rules.rule import Finding, Lack, Rule
from kedge.short_text import counted
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Floats, Ints

#: So many points are enough for a slope, which compares all pairs of them.
_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class ScaleDriftEvidence(Evidence):
    """How fast the sites drift, in doublings, and the course of the fastest."""

    doublings_per_1000_steps: float | None = said("{} doublings in 1,000 steps")
    doublings: float | None = said("{} doublings")
    sites: Mapping[str, float | None] = places("sites")
    course: Sequence[float | None] = unsaid()


@dataclass(frozen=True)
class ScaleDrift(Rule):
    """The scale of an activation grows or shrinks steadily, and does not level off.

    Meaning:
        Outputs that keep doubling end in overflow, in saturation or in logits without a gradient;
        outputs that keep halving vanish. In a healthy run they change most at the start, and then
        less and less.

    Formula:
        a(t) = log2 rms(output) of a module with a weight, over the second half of the steps. D =
        the Theil-Sen slope of a over the steps. Reported if |D| > slope per 1,000 steps; if |D|
        times the length of that half > doublings; and if a changed all the time and has not
        levelled off: divided into eight parts, a never leaves the line of slope D by more than
        straight times the doublings.

    Window:
        The second half of the run, at least min_samples measured steps of it.

    Thresholds:
        - slope (0.5): doublings per 1,000 steps; a slower drift is part of learning.
        - doublings (3): a factor of eight, within half a run. Healthy runs of 160 to 800 steps that
          did not slow down changed by at most 2.0, in the logits of a run with a very small
          learning rate.
        - straight (0.1): of the height of the line. Healthy runs that leave a plateau change by up
          to 9.3 doublings and then slow down: they left the line by 0.15 or more, runs with a
          planted drift by 0.05 or less.
        - min_samples (10): in the second half; or the last samples, if most are before it.

    Evidence:
        The slope, the doublings, the scale in the last samples, and the slopes of other modules
        that drift.

    Remedy:
        Add normalisation or weight decay, lower the learning rate, and look for a value that is
        scaled again and again: a running statistic, a residual branch without a norm, a weight
        without decay.

    Cannot see:
        A drift inside of a module, or one that is slower than the run is long; whether the
        drift does harm.
    """

    slope: float = 0.5
    doublings: float = 3.0
    straight: float = 0.1
    min_samples: int = 10

    code = "SCALE-DRIFT"
    name = "the scale of an activation keeps changing and does not level off"
    severity = "warning"
    of_training = True
    follows = (
        "INPUT-SCALE INIT-SCALE DOUBLE-SOFTMAX LOSS-BELOW-ZERO GRADS-KEPT "
        "RATE-TOO-LARGE GRAD-ZERO:all GRAD-EXPLODE"
    )

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root: the module that drifts fastest."""
        if len(recording.steps) < 2 * self.min_samples - 1:
            return
        sites = outputs_of_weights(recording)
        scales = log2(recording.matrix(sites, "rms"))
        drifts = [
            drift
            for site, course in zip(sites, scales, strict=True)
            if (drift := self._drift(site, recording.steps, course))
        ]
        for _, own in by_root(drifts, lambda drift: drift.course.site.root):
            yield self._finding(sorted(own, key=lambda drift: -abs(drift.slope)))

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured outputs for both halves of the run."""
        sites = outputs_of_weights(recording)
        if not sites:
            return None
        return too_few(self.code, measured(recording, sites), 2 * self.min_samples - 1)

    def _drift(self, site: SiteInfo, steps: Ints, scales: Floats) -> _Drift | None:
        course = Course(site, steps, scales).where(np.isfinite(scales))
        if len(course) < 2 * self.min_samples - 1:
            return None
        half = np.searchsorted(course.steps, (course.steps[0] + course.steps[-1]) / 2)
        course = course.where(slice(min(int(half), len(course) - self.min_samples), None))
        course = course.where(slice(None, None, -(-len(course) // _POINTS)))
        drift = _Drift(course, theil_sen(course.steps, course.values))
        is_steep = abs(drift.slope) * 1000 > self.slope
        fast = is_steep and abs(drift.doublings) > self.doublings
        if fast and drift.bend <= self.straight * abs(drift.doublings):
            return drift
        return None

    def _finding(self, own: list[_Drift]) -> Finding:
        worst = own[0]
        course = own[0].course
        start = 2 ** float(course.values[0])
        end = 2 ** float(course.values[-1])
        first = int(course.steps[0])
        changed = "shrank"
        if worst.slope > 0:
            changed = "grew"
        others = ""
        if len(own) > 1:
            others = f"; also drifting: {counted(len(own) - 1, 'more module')}"
        return Finding(
            code=self.code,
            severity=self.severity,
            site=course.site.site,
            step=first,
            message=f"{course.site.site} {changed} from {start:.3g} to {end:.3g} "
            f"(rms) since step {first}, {abs(worst.slope) * 1000:.2g} doublings per "
            f"1,000 steps, and has not levelled off{others}.",
            evidence=ScaleDriftEvidence(
                doublings_per_1000_steps=plain(worst.slope * 1000),
                doublings=plain(worst.doublings),
                sites={drift.course.site.site: plain(drift.slope * 1000) for drift in own[:NAMED]},
                course=[plain(2**scale) for scale in course.values[-NAMED:]],
            ),
            confidence=0.8,
            remedy="Add normalisation or weight decay, lower the learning rate, and "
            "look for a value that is scaled again and again: a running statistic, a "
            "residual branch without a norm.",
        )


@dataclass(frozen=True)
class _Drift:
    """The logarithm of a scale, and its slope."""

    course: Course
    slope: float

    @property
    def doublings(self) -> float:
        """How often the scale doubled from the first step to the last."""
        return self.slope * float(self.course.steps[-1] - self.course.steps[0])

    @property
    def bend(self) -> float:
        """The largest distance of the course from a line of its slope, by the medians of its eighths."""
        rest = self.course.values - self.slope * self.course.steps
        middle = np.median(rest)
        return max(abs(float(np.median(part) - middle)) for part in np.array_split(rest, 8))
