"""Numbers near the ends of their format: too large for it soon, or too small for it already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kedge.rules.naming import NAMED, plain
from kedge.rules.rule import Finding, Lack, Severity
from kedge.rules.samples import measured, too_few
from kedge.store.exponents import SMALLEST_NORMAL, below
from kedge.store.formats import FORMATS, NumberFormat
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL, Floats, Ints, Rows

#: Half formats are trained with a loss scale that is raised until gradients overflow: there they are near by design.
SCALED = frozenset({"float16", "float8_e5m2", "float8_e4m3fn"})

#: How many windows of steps are looked through for one of steps with something to judge.
LOOKED_THROUGH = 4


@dataclass(frozen=True)
class NearOverflow:
    """Values come close to the largest number that their dtype can hold.

    What it says:
        A few more doublings and they are infinite; NaN follows. In float16 the end is at 65,504,
        which activations of a network without normalisation reach.

    Formula:
        h = log2(largest / max |x|), largest being the greatest finite number of the site's own dtype: how
        often the greatest value could double. Reported if h < headroom in min_samples sampled steps. Left out
        is an extreme that is the same in every step: it is written in the program, as the value
        of a mask is; and in float16 and the 8-bit formats all gradients, because loss scaling drives them
        there on purpose.

    Window:
        The whole run: the sampled steps in which the site was finite.

    Thresholds:
        - headroom (2): two doublings. msProbe and transformers' DebugUnderflowOverflow show the
          distance and set no limit; unit-scaling draws the line at the limit itself. Healthy networks in
          float16 kept 11 doublings and more.
        - min_samples (3): so that what happens once is left to the eye, and a constant is known as one.

    Evidence:
        The largest value, the dtype and its limit, the headroom left, how many sites are as near, and the course of
        the largest value over the last sampled steps.

    Remedy:
        Normalise before the module, scale its input or its weights down, or compute it in bfloat16 or float32,
        whose range is that of float32.
    """

    headroom: float = 2.0
    min_samples: int = 3

    code: ClassVar[str] = "NEAR-OVERFLOW"
    name: ClassVar[str] = "values close to the largest number of their dtype"
    severity: ClassVar[Severity] = "warning"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give one finding for every root and kind of site: the first site of the flow that comes near."""
        groups: dict[tuple[int, str], list[_Extreme]] = {}
        for site in recording.sites:
            extreme = self._near(recording, site)
            if extreme is not None:
                groups.setdefault((site.root, site.kind), []).append(extreme)
        for near in groups.values():
            yield self._finding(near)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return how many measured steps are missing."""
        sites = [site for site in recording.sites if site.dtype in FORMATS and len(recording.rows(site))]
        return too_few(self.code, measured(recording, sites), self.min_samples) if sites else None

    def _near(self, recording: Recording, site: SiteInfo) -> _Extreme | None:
        form = FORMATS.get(site.dtype)
        if form is None or (site.dtype in SCALED and _is_gradient(site)):
            return None
        extreme = _Extreme.of(recording, site, form)
        near = extreme.largest > form.largest / 2**self.headroom
        return extreme if near.sum() >= self.min_samples else None

    def _finding(self, near: list[_Extreme]) -> Finding:
        first = near[0]
        limit = first.form.largest / 2**self.headroom
        step, largest = int(first.steps[first.largest > limit][0]), float(first.largest.max())
        others = f"; so do {len(near) - 1} more sites" if len(near) > 1 else ""
        return Finding(
            code=self.code,
            severity=self.severity,
            site=first.site.site,
            step=step,
            message=f"{first.site.site} comes to {largest:.3g} where {first.site.dtype} ends at {first.form.largest:.3g} "
            f"(first near it at step {step}){others}.",
            evidence={
                "largest": plain(largest),
                "limit": plain(first.form.largest),
                "headroom": plain(first.form.headroom(largest)),
                "dtype": first.site.dtype,
                "sites": [extreme.site.site for extreme in near[:NAMED]],
                "steps": first.steps[-NAMED:].tolist(),
                "course": [plain(value) for value in first.largest[-NAMED:]],
            },
            confidence=0.9,
            remedy="Normalise before it, scale its input or its weights down, or compute it in bfloat16 or float32.",
        )


@dataclass(frozen=True)
class Underflow:
    """Gradients too small for their dtype: many have lost digits, and more have become zero.

    What it says:
        Below its smallest normal number a format has fewer digits, and below that nothing but zero. Where a
        share of the gradients that are left lies there, others were lost without a trace.

    Formula:
        U = the share of the non-zero elements of a gradient below the smallest normal number of its own dtype:
        2^-14 in float16, 2^-126 in bfloat16 and float32. It is taken from the histogram of exponents.
        Reported for a root if the median of U over the window > share in spread of its gradients of one
        dtype, and in two at least. Activations are not judged: a small output of softmax or of
        GELU may well be taken for zero.

    Window:
        The last window sampled steps in which the gradient was finite and not zero throughout, at least min_samples.

    Thresholds:
        - share (0.05): one in twenty. Transformer Engine shows the share of underflows and sets no limit.
          Healthy runs in float16 with a loss scale: less than 0.01 in the median site; runs without one
          0.08 to 1.
        - spread (0.5): of the gradients. A confident model's logits get tiny ones, and nothing is lost with
          them: with a loss scale a quarter of a model's gradients were beyond the share, without one
          two thirds and more.
        - window (40), min_samples (10): enough for a median.

    Evidence:
        The share at the worst sites, how many sites are concerned, of how many, and the dtype.

    Remedy:
        In float16 scale the loss (torch.amp.GradScaler), or use bfloat16, which has the range of float32. If there is
        a scaler: it starts too low, or the loss is divided by too much.
    """

    share: float = 0.05
    spread: float = 0.5
    window: int = 40
    min_samples: int = 10

    code: ClassVar[str] = "UNDERFLOW"
    name: ClassVar[str] = "gradients too small for their dtype"
    severity: ClassVar[Severity] = "warning"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give at most one finding for every root and dtype."""
        groups: dict[tuple[int, str], list[tuple[SiteInfo, float]]] = {}
        for site in self._judged(recording):
            lost = self._lost(recording, site, FORMATS[site.dtype])
            if lost is not None:
                groups.setdefault((site.root, site.dtype), []).append((site, lost))
        for (root, dtype), sites in groups.items():
            yield from self._judge(recording, root, dtype, sites)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return how many histograms of gradients are missing; where a gradient is zero there is none to draw."""
        known = [_drawn(recording.rows(site)) for site in self._judged(recording) if len(recording.rows(site))]
        return too_few(self.code, max(known), self.min_samples, "steps with histograms of gradients") if known else None

    def _judged(self, recording: Recording) -> Iterator[SiteInfo]:
        """List the gradients in formats whose ends the histograms reach; those of float64 lie beyond them."""
        for site in (*recording.of_kind("out.grad"), *recording.of_kind("param.grad")):
            form = FORMATS.get(site.dtype)
            if form is not None and form.lowest_power >= SMALLEST_NORMAL:
                yield site

    def _lost(self, recording: Recording, site: SiteInfo, form: NumberFormat) -> float | None:
        """Give the usual share of elements below the smallest normal number; None if too little was drawn."""
        rows = recording.rows(site)
        # Where the gradient was zero throughout nothing was drawn, so a few windows are looked through for one.
        _, counts = recording.exponents(site, rows.step[rows.clean][-LOOKED_THROUGH * self.window :])
        counts = counts[-self.window :]
        if len(counts) < self.min_samples:
            return None
        return float(np.median(below(counts, form.lowest_power)))

    def _judge(
        self, recording: Recording, root: int, dtype: str, sites: list[tuple[SiteInfo, float]]
    ) -> Iterator[Finding]:
        lossy = sorted((entry for entry in sites if entry[1] > self.share), key=lambda entry: -entry[1])
        if len(lossy) < max(2, self.spread * len(sites)):
            return
        worst, lost = lossy[0]
        model = recording.roots[root].name if root < len(recording.roots) else "the model"
        yield Finding(
            code=self.code,
            severity=self.severity,
            site=worst.site,
            step=-1,
            message=f"{lost:.0%} of what is left of {worst.site} lies below {FORMATS[dtype].smallest_normal:.2g}, where {dtype} "
            f"loses digits; more than {self.share:.0%} does in {len(lossy)} of the {len(sites)} gradients of {model} "
            f"in {dtype}.",
            evidence={
                "shares": {site.site: plain(share) for site, share in lossy[:NAMED]},
                "concerned": len(lossy),
                "gradients": len(sites),
                "dtype": dtype,
            },
            confidence=0.9,
            remedy=_SCALE if dtype in SCALED else _WIDE,
        )


_SCALE = (
    "Scale the loss (torch.amp.GradScaler), or use bfloat16, which has the range of float32; with a scaler in place, "
    "start it higher or divide the loss by less."
)
_WIDE = (
    "No scale helps a gradient as small as this: look for what shrinks it (GRAD-VANISH), or for a loss that is "
    "divided by too much."
)


@dataclass(frozen=True)
class _Extreme:
    """The greatest magnitude at one site in every step that measured it, without constants of the program."""

    site: SiteInfo
    form: NumberFormat
    steps: Ints
    largest: Floats

    @classmethod
    def of(cls, recording: Recording, site: SiteInfo, form: NumberFormat) -> _Extreme:
        """Read the steps in which the extremes were measured and finite."""
        rows = recording.rows(site)
        measured = np.isfinite(rows.min) & np.isfinite(rows.max)
        low, high = _varying(rows.min[measured]), _varying(rows.max[measured])
        return cls(site, form, rows.step[measured], np.maximum(np.abs(low), np.abs(high)))


def _drawn(rows: Rows) -> int:
    """Return in how many steps a histogram was drawn, or the gradient was zero throughout."""
    return int(((rows.held("exponents").lengths > 0) | (rows.level == FULL) & (rows.sumsq == 0)).sum())


def _varying(extreme: Floats) -> Floats:
    """Give zeros in place of an extreme that is the same in every step."""
    return np.zeros_like(extreme) if len(extreme) and (extreme == extreme[0]).all() else extreme


def _is_gradient(site: SiteInfo) -> bool:
    return site.kind.endswith(".grad")
