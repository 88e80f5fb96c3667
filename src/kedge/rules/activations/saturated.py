"""SATURATED: activations whose outputs lie where they are flat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kedge.rules.naming import NAMED, plain
from kedge.rules.recorded.samples import too_few
from kedge.rules.recorded.trained import trained_sites
from kedge.rules.recorded.wiring import Wiring, wire
from kedge.rules.rule import Finding, Lack, Rule, Words
from kedge.short_text import counted
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Bools, Floats, Ints

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
    """

    share: float = 0.5
    window: int = 20
    min_samples: int = 10

    code = "SATURATED"
    name = "most outputs of an activation are where it is flat"
    severity = "warning"
    statistic = "saturated"
    follows = "INPUT-SCALE INIT-SCALE DOUBLE-SOFTMAX LOSS-BELOW-ZERO GRADS-KEPT RATE-TOO-LARGE"
    words: ClassVar[Words] = {"saturated_sites": "{} saturated sites"}

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root: the first saturated site of the flow."""
        wiring = wire(recording)
        found: dict[int, list[tuple[SiteInfo, float, Ints, Floats]]] = {}
        shown = _shown(recording)
        for site in (site for site in trained_sites(recording, "out") if shown[site.id]):
            steps, course = _course(recording, site)
            usual = (
                float(np.median(course[-self.window :])) if len(course) >= self.min_samples else 0.0
            )
            if (
                usual > self.share
                and site.type not in FLAT_BY_DESIGN
                and not _is_last(wiring, site)
            ):
                found.setdefault(site.root, []).append((site, usual, steps, course))
        for sites in found.values():
            yield self._finding(sites)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured shares; a model without such activations has nothing to judge."""
        wiring, shown = wire(recording), _shown(recording)
        courses = [
            len(_course(recording, site)[0])
            for site in trained_sites(recording, "out")
            if shown[site.id] and site.type not in FLAT_BY_DESIGN and not _is_last(wiring, site)
        ]
        return too_few(self.code, max(courses), self.min_samples) if courses else None

    def _finding(self, sites: list[tuple[SiteInfo, float, Ints, Floats]]) -> Finding:
        site, usual, steps, course = sites[0]
        last, rate = course[-self.window :], "" if course[0] > self.share else " or learning rate"
        step = int(steps[course > self.share][0])
        others = (
            f"; also saturated: {counted(len(sites) - 1, 'more activation')}"
            if len(sites) > 1
            else ""
        )
        return Finding(
            code=self.code,
            severity=self.severity,
            site=site.site,
            step=step,
            message=f"{usual:.0%} of the outputs of {site.site} ({site.type}) are where its slope is below 0.001 "
            f"(median of the last {len(last)} measured steps; first at step {step}){others}.",
            evidence={
                "shares": {other.site: plain(share) for other, share, _, _ in sites[:NAMED]},
                "saturated_sites": len(sites),
                "steps": steps[-NAMED:].tolist(),
                "course": [plain(value) for value in course[-NAMED:]],
            },
            confidence=0.9,
            remedy=f"Scale its input down: a smaller initialisation (Xavier){rate}"
            ", normalisation before it, inputs of zero mean and unit variance; or use an activation without flat ends.",
        )


def _shown(recording: Recording) -> Bools:
    """Return for each site whether any of its rows has a share of saturated outputs."""
    rows = recording.all_rows
    return rows.any(np.isfinite(rows.rows.statistic("saturated")) & rows.rows.clean)


def _course(recording: Recording, site: SiteInfo) -> tuple[Ints, Floats]:
    """Return the share of saturated outputs in every step that measured it."""
    rows = recording.rows(site)
    shares = rows.statistic("saturated")
    known = np.isfinite(shares) & rows.clean
    return rows.step[known], shares[known]


def _is_last(wiring: Wiring, site: SiteInfo) -> bool:
    """Whether only the containers of a module return after it, of the modules of its root."""
    module = wiring.modules[site.owner]
    holders = [holder for holder in wiring.ancestors(module) if holder.position > module.position]
    return wiring.later(module) == len(holders)
