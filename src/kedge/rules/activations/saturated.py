"""SATURATED: activations whose outputs lie where they are flat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.rules.evidence import Evidence, axis, curve, places, said
from kedge.rules.naming import NAMED, plain
from kedge.rules.recorded.course import Course
from kedge.rules.recorded.samples import too_few
from kedge.rules.recorded.trained import trained_sites
from kedge.rules.recorded.wiring import Wiring, wire
from kedge.rules.rule import Finding, Lack, Rule
from kedge.short_text import counted
from kedge.store.recording import Recording, SiteInfo

#: Activations that are flat on purpose for a good part of their inputs: below zero, or for every
#: class but one.
FLAT_BY_DESIGN = frozenset(
    {
        "ReLU6",
        "Hardswish",
        "Softmax",
        "Softmax2d",
        "LogSoftmax",
        "Softmin",
        "Softshrink",
        "Hardshrink",
    }
)


@dataclass(frozen=True, kw_only=True)
class SaturatedEvidence(Evidence):
    """The shares of flat outputs, and the course of the worst site."""

    shares: Mapping[str, float | None] = places("share at each site")
    saturated_sites: int = said("{} saturated sites")
    steps: Sequence[int] = axis("steps {}")
    course: Sequence[float | None] = curve()


@dataclass(frozen=True)
class Saturated(Rule):
    """The inputs of a tanh or sigmoid are so large that it is flat there: hardly any gradient passes.

    Meaning:
        Most outputs of the activation are where its slope is close to zero. The layers before it
        hardly learn, and its output is little more than a sign.

    Formula:
        S = the share of a saturating activation's outputs with a slope |f'(x)| < 1e-3, counted
        among elements drawn in each measured step. Reported if the median of S over the window >
        share. Left out are the last module of a model, because a sigmoid that returns a probability
        should become sure; and activations that are flat by design for half of their inputs, such
        as ReLU6, or for all classes but one, such as softmax.

    Window:
        The last window measured steps, at least min_samples.

    Thresholds:
        - share (0.5): as in smdebug, for the share of saturated neurons of a layer. tanh reaches
          the slope of 1e-3 at |x| = 4.1, sigmoid at |x| = 6.9. smdebug's limit on the input (tanh:
          9.5) corresponds to a slope of 2e-8. Healthy networks with tanh stayed below 0.01, faulty
          ones had 0.6 or more.
        - window (20), min_samples (10): a lasting state, not one of a few steps.

    Evidence:
        The share at the site, as the median and in each of the last measured steps, and the other
        saturated sites.

    Remedy:
        Scale down its input: a smaller initialisation (Xavier), normalisation before it, a smaller
        learning rate, inputs with zero mean and unit variance. Or use an activation without flat
        ends.

    Cannot see:
        Activations that the forward calls as functions, such as torch.tanh, and the gates
        inside of recurrent layers.
    """

    share: float = 0.5
    window: int = 20
    min_samples: int = 10

    code = "SATURATED"
    name = "most outputs of an activation are where it is flat"
    severity = "warning"
    of_training = True
    statistic = "saturated"
    follows = "INPUT-SCALE INIT-SCALE DOUBLE-SOFTMAX LOSS-BELOW-ZERO GRADS-KEPT RATE-TOO-LARGE"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root: the first saturated site of the flow."""
        found: dict[int, list[tuple[Course, float]]] = {}
        for course in _shares(recording):
            if len(course) < self.min_samples:
                continue
            usual = float(np.median(course.values[-self.window :]))
            if usual > self.share:
                found.setdefault(course.site.root, []).append((course, usual))
        for courses in found.values():
            yield self._finding(courses)

    def idle(self, recording: Recording) -> str:
        """Return that no activation has a limit."""
        if not _shares(recording):
            return "no activation that saturates"
        return ""

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured shares; a model without such activations has nothing to judge."""
        have = max(map(len, _shares(recording)), default=None)
        if have is None:
            return None
        return too_few(self.code, have, self.min_samples)

    def _finding(self, courses: list[tuple[Course, float]]) -> Finding:
        course, usual = courses[0]
        site = course.site
        judged = min(len(course), self.window)
        rate = " or learning rate"
        if course.values[0] > self.share:
            rate = ""
        step = course.first_step(course.values > self.share)
        others = ""
        if len(courses) > 1:
            others = f"; also saturated: {counted(len(courses) - 1, 'more activation')}"
        return Finding(
            code=self.code,
            severity=self.severity,
            site=site.site,
            step=step,
            message=f"{usual:.0%} of the outputs of {site.site} ({site.type}) are "
            f"where its slope is below 0.001 (median of the last {judged} measured "
            f"steps; first at step {step}){others}.",
            evidence=SaturatedEvidence(
                shares={other.site.site: plain(share) for other, share in courses[:NAMED]},
                saturated_sites=len(courses),
                steps=course.steps[-NAMED:].tolist(),
                course=[plain(value) for value in course.values[-NAMED:]],
            ),
            confidence=0.9,
            remedy=f"Scale its input down: a smaller initialisation (Xavier){rate}, "
            "normalisation before it, inputs of zero mean and unit variance; or use "
            "an activation without flat ends.",
        )


def _shares(recording: Recording) -> list[Course]:
    """Return the shares of saturated outputs at the activations that are judged."""
    rows = recording.all_rows
    shown = rows.any(np.isfinite(rows.rows.statistic("saturated")) & rows.rows.clean)
    wiring = wire(recording)
    return [
        Course.of(recording, site, "saturated")
        for site in trained_sites(recording, "out")
        if shown[site.id] and site.type not in FLAT_BY_DESIGN and not _is_last(wiring, site)
    ]


def _is_last(wiring: Wiring, site: SiteInfo) -> bool:
    """Whether only the containers of a module return after it, of the modules of its root."""
    module = wiring.modules[site.owner]
    around = wiring.ancestors(module)
    holders = [holder for holder in around if holder.position > module.position]
    return wiring.later(module) == len(holders)
