"""NEAR-OVERFLOW: values close to the largest number of their format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.rules.activations.underflow import SCALED
from kedge.rules.evidence import Evidence, axis, curve, said
from kedge.rules.naming import NAMED, plain
from kedge.rules.recorded.course import Course
from kedge.rules.recorded.samples import measured, too_few
from kedge.rules.rule import Finding, Lack, Rule
from kedge.short_text import counted
from kedge.store.formats import FORMATS
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Floats


@dataclass(frozen=True, kw_only=True)
class NearOverflowEvidence(Evidence):
    """The largest magnitude, what its dtype can hold, and the sites that come close to it."""

    largest: float | None = said("largest {}")
    limit: float | None = said("the limit is {}", limit="limit")
    headroom: float | None = said("room for {} doublings")
    dtype: str = said("in {}")
    sites: Sequence[str] = said("sites {}")
    steps: Sequence[int] = axis("steps {}")
    course: Sequence[float | None] = curve()


@dataclass(frozen=True)
class NearOverflow(Rule):
    """Values come close to the largest number that their dtype can hold.

    Meaning:
        A few more doublings and they are infinite; NaN follows. The limit of float16 is 65,504,
        which the activations of a network without normalisation can reach.

    Formula:
        h = log2(largest / max |x|), where largest is the greatest finite number of the site's own
        dtype: how many times the greatest value could double. Reported if h < headroom in
        min_samples measured steps. An extreme that is the same in every step is left out: it is a
        constant of the program, such as the value of a mask. Gradients in float16 and the 8-bit
        formats are left out too, because loss scaling drives them there on purpose.

    Window:
        The whole run: the measured steps in which the site was finite.

    Thresholds:
        - headroom (2): two doublings. msProbe and transformers' DebugUnderflowOverflow show the
          distance and set no limit; unit-scaling uses the limit of the dtype itself. Healthy
          networks in float16 kept at least 11 doublings.
        - min_samples (3): a single step is not reported, and constants can be recognised.

    Evidence:
        The largest value, the dtype and its limit, the headroom left, the other sites that are as
        close, and the largest value in each of the last measured steps.

    Remedy:
        Normalise before the module, scale down its input or its weights, or compute it in bfloat16
        or float32, whose range is much larger.

    Cannot see:
        Values inside of a module that it does not return, such as the scores of an attention.
    """

    headroom: float = 2.0
    min_samples: int = 3

    code = "NEAR-OVERFLOW"
    name = "values close to the largest number of their dtype"
    severity = "warning"
    statistic = "absmax"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield one finding for every root and kind of site: the first site of the flow that comes near."""
        groups: dict[tuple[int, str], list[Course]] = {}
        rows = recording.all_rows
        measured = np.isfinite(rows.rows.min) & np.isfinite(rows.rows.max)
        largest = np.maximum(np.abs(rows.rows.min), np.abs(rows.rows.max))
        limits = np.array([self._limit(site) for site in recording.sites])
        counts = rows.count(measured & (largest > limits[rows.site]))
        is_near = np.isfinite(limits) & (counts >= self.min_samples)
        for number in np.flatnonzero(is_near).tolist():
            site = recording.sites[number]
            course = _magnitudes(recording, site)
            if (course.values > limits[number]).sum() >= self.min_samples:
                groups.setdefault((site.root, site.kind), []).append(course)
        for near in groups.values():
            yield self._finding(near)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured steps."""
        lengths = recording.all_rows.lengths
        known = [site for site in recording.sites if site.dtype in FORMATS]
        sites = [site for site in known if lengths[site.id]]
        if not sites:
            return None
        return too_few(self.code, measured(recording, sites), self.min_samples)

    def _limit(self, site: SiteInfo) -> float:
        """Return the magnitude above which a site is close to the limit of its format; infinite if it is not judged."""
        form = FORMATS.get(site.dtype)
        if form is None or (site.dtype in SCALED and _is_gradient(site)):
            return np.inf
        return form.largest / 2**self.headroom

    def _finding(self, near: list[Course]) -> Finding:
        first = near[0]
        form = FORMATS[first.site.dtype]
        step = first.first_step(first.values > self._limit(first.site))
        largest = float(first.values.max())
        others = ""
        if len(near) > 1:
            others = f"; also close: {counted(len(near) - 1, 'more site')}"
        return Finding(
            code=self.code,
            severity=self.severity,
            site=first.site.site,
            step=step,
            message=f"{first.site.site} reaches {largest:.3g}; the largest "
            f"{first.site.dtype} is {form.largest:.3g} (first close to it at step "
            f"{step}){others}.",
            evidence=NearOverflowEvidence(
                largest=plain(largest),
                limit=plain(form.largest),
                headroom=plain(form.headroom(largest)),
                dtype=first.site.dtype,
                sites=[course.site.site for course in near[:NAMED]],
                steps=first.steps[-NAMED:].tolist(),
                course=[plain(value) for value in first.values[-NAMED:]],
            ),
            confidence=0.9,
            remedy="Normalise before it, scale its input or its weights down, or "
            "compute it in bfloat16 or float32.",
        )


def _magnitudes(recording: Recording, site: SiteInfo) -> Course:
    """Return the greatest magnitude in the steps in which the extremes were finite, without constants of the program."""
    rows = recording.rows(site)
    measured = np.isfinite(rows.min) & np.isfinite(rows.max)
    low = _varying(rows.min[measured])
    high = _varying(rows.max[measured])
    return Course(site, rows.step[measured], np.maximum(np.abs(low), np.abs(high)))


def _varying(extreme: Floats) -> Floats:
    """Return an extreme; zeros in its place if it is the same in every step."""
    if len(extreme) and (extreme == extreme[0]).all():
        return np.zeros_like(extreme)
    return extreme


def _is_gradient(site: SiteInfo) -> bool:
    return site.kind.endswith(".grad")
