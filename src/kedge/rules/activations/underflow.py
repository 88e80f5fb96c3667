"""UNDERFLOW: gradients below the smallest normal number of their format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kedge.rules.evidence import Evidence, places, said
from kedge.rules.naming import NAMED, plain
from kedge.rules.recorded.losses import steps_with_little_loss
from kedge.rules.recorded.roots import names_of
from kedge.rules.recorded.samples import too_few
from kedge.rules.rule import Finding, Lack, Rule
from kedge.store.exponents import SMALLEST_NORMAL, below
from kedge.store.formats import FORMATS, NumberFormat
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL, Ints

#: Half formats are trained with a loss scale that is raised until gradients overflow: their
#: gradients are large by design.
SCALED = frozenset({"float16", "float8_e5m2", "float8_e4m3fn"})

#: How many windows of steps are searched for one window of steps with a histogram.
_SEARCHED = 4


@dataclass(frozen=True, kw_only=True)
class UnderflowEvidence(Evidence):
    """The shares of elements that are too small, of the first of the sites."""

    shares: Mapping[str, float | None] = places("share at each site")
    concerned: int = said("{} of this kind")
    gradients: int = said("of {} gradients")
    dtype: str = said("in {}")


@dataclass(frozen=True)
class Underflow(Rule):
    """Gradients are too small for their dtype: many have lost digits, and others have become zero.

    Meaning:
        Below its smallest normal number a format has fewer digits, and further below only zero. If
        a share of the remaining gradients is in that range, others have become zero already.

    Formula:
        U = the share of the non-zero elements of a gradient that are below the smallest normal
        number of its dtype (2^-14 in float16, 2^-126 in bfloat16 and float32), according to the
        histogram of exponents. Reported for a root if the median of U over the window > share in
        spread of its gradients of one dtype, and in at least two. Activations are not judged: a
        small output of softmax or GELU may become zero without harm.

    Window:
        The last window measured steps in which the gradient was finite and not all zero, at least
        min_samples. Steps in which every loss has fallen below settled of its first values are left
        out: where little is left to learn, gradients are small without harm.

    Thresholds:
        - share (0.05): one in twenty. Transformer Engine shows the share of underflows and sets no
          limit. Healthy runs in float16 with a loss scale: less than 0.01 at the median site; runs
          without one: 0.08 to 1.
        - spread (0.5): of the gradients. The logits of a confident model get tiny gradients without
          harm: with a loss scale, a quarter of a model's gradients exceeded the share; without one,
          two thirds or more.
        - window (40), min_samples (10): enough for a median.
        - settled (1e-2): a loss that has fallen to a hundredth was not held up by lost digits.

    Evidence:
        The share at the worst sites, the number of affected sites and of all sites, and the dtype.

    Remedy:
        In float16, scale the loss (torch.amp.GradScaler), or use bfloat16, which has the range of
        float32. If there is a scaler already: it starts too low, or the loss is divided by too
        much.

    Cannot see:
        Activations that have become zero, gradients inside of a module, and an optimizer whose
        own squares or sums are too small for their dtype.
    """

    share: float = 0.05
    spread: float = 0.5
    window: int = 40
    min_samples: int = 10
    settled: float = 0.01

    code = "UNDERFLOW"
    name = "gradients too small for their dtype"
    severity = "warning"
    statistic = "q05"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root and dtype."""
        groups: dict[tuple[int, str], list[tuple[SiteInfo, float]]] = {}
        rows = recording.all_rows
        drawn = rows.count(rows.rows.held("exponents").lengths > 0)
        done = steps_with_little_loss(recording, self.settled)
        for site in (
            site for site in self._judged(recording) if drawn[site.id] >= self.min_samples
        ):
            lost = self._lost(recording, site, FORMATS[site.dtype], done)
            if lost is not None:
                groups.setdefault((site.root, site.dtype), []).append((site, lost))
        for (root, dtype), sites in groups.items():
            yield from self._judge(recording, root, dtype, sites)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of histograms of gradients; a gradient of zeros counts as one, though it has no histogram."""
        rows = recording.all_rows
        histograms = rows.rows.held("exponents").lengths > 0
        drawn = rows.count(histograms | (rows.rows.level == FULL) & (rows.rows.sumsq == 0))
        known = [int(drawn[site.id]) for site in self._judged(recording) if rows.lengths[site.id]]
        if not known:
            return None
        return too_few(
            self.code, max(known), self.min_samples, "steps with histograms of gradients"
        )

    def _judged(self, recording: Recording) -> Iterator[SiteInfo]:
        """Yield the gradients in formats whose smallest numbers the histograms reach; those of float64 lie beyond."""
        for site in (*recording.of_kind("out.grad"), *recording.of_kind("param.grad")):
            form = FORMATS.get(site.dtype)
            if form is not None and form.lowest_power >= SMALLEST_NORMAL:
                yield site

    def _lost(
        self, recording: Recording, site: SiteInfo, form: NumberFormat, done: Ints
    ) -> float | None:
        """Return the median share of elements below the smallest normal number; None with too few histograms."""
        rows = recording.rows(site)
        # A gradient of zeros has no histogram, so several windows of steps are searched for one.
        _, counts = recording.exponents(
            site, np.setdiff1d(rows.step[rows.clean], done)[-_SEARCHED * self.window :]
        )
        counts = counts[-self.window :]
        if len(counts) < self.min_samples:
            return None
        return float(np.median(below(counts, form.lowest_power)))

    def _judge(
        self, recording: Recording, root: int, dtype: str, sites: list[tuple[SiteInfo, float]]
    ) -> Iterator[Finding]:
        lossy = sorted(
            (entry for entry in sites if entry[1] > self.share), key=lambda entry: -entry[1]
        )
        if len(lossy) < max(2, self.spread * len(sites)):
            return
        worst, lost = lossy[0]
        remedy = _WIDE
        if dtype in SCALED:
            remedy = _SCALE
        yield Finding(
            code=self.code,
            severity=self.severity,
            site=worst.site,
            step=-1,
            message=f"{lost:.0%} of the non-zero elements of {worst.site} are below "
            f"{FORMATS[dtype].smallest_normal:.2g}, where {dtype} loses digits. In "
            f"{len(lossy)} of the {len(sites)} {dtype} gradients of "
            f"{names_of(recording, [root])} more than {self.share:.0%} are.",
            evidence=UnderflowEvidence(
                shares={site.site: plain(share) for site, share in lossy[:NAMED]},
                concerned=len(lossy),
                gradients=len(sites),
                dtype=dtype,
            ),
            confidence=0.9,
            remedy=remedy,
        )


_SCALE = (
    "Scale the loss (torch.amp.GradScaler), or use bfloat16, which has the range of "
    "float32; with a scaler in place, start it higher or divide the loss by less."
)
_WIDE = (
    "A loss scale cannot help so small a gradient: look for the reason why it fades "
    "(GRAD-VANISH), or for a loss that is divided by too much."
)
