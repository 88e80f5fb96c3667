"""UPDATE-RATIO: the relative change of the weights in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from kedge.rules.evidence import Evidence, places, said
from kedge.rules.naming import NAMED, plain
from kedge.rules.recorded.losses import still_falls
from kedge.rules.recorded.samples import measured, too_few
from kedge.rules.recorded.trained import trains
from kedge.rules.recorded.weights import (
    STARVED,
    WeightCourses,
    finite_medians,
    first_finites,
    weight_courses,
    weights,
)
from kedge.rules.rule import Finding, Lack, Rule
from kedge.store.recording import Recording
from kedge.store.rows import Floats


@dataclass(frozen=True, kw_only=True)
class UpdateRatioEvidence(Evidence):
    """The updates of some weights relative to their sizes."""

    ratios: Mapping[str, float | None] = places("ratios")
    weights: int = said("of {} weights")
    concerned: int = said("{} of this kind")
    samples: int = said("{} measured steps")
    dtype: str = said("in {}")


@dataclass(frozen=True)
class UpdateRatio(Rule):
    """Optimizer steps change the weights far too much, or hardly at all.

    Meaning:
        A step that changes a weight by a tenth of its size destroys earlier progress; steps that
        change it by a millionth, throughout the run, make none.

    Formula:
        u = rms(update) / rms(weight) for each weight and measured step; the update is the change
        made by one optimizer step, in a fixed sample of the elements. Too large: the median of u
        over the window > high. Too small: the quantile of u over the whole run < low, in steps
        whose gradient was not zero.

    Window:
        Too large: the last window measured steps. Too small: the whole run, so that a learning rate
        that decays to zero is not reported, nor a run near the end of its training. At least
        min_samples steps in both cases.

        Weights are parameters with two or more dimensions. Weights that started at zero are left
        out, because any later size is large relative to zero. For too small, these are left out as
        well: embeddings, most of whose rows get no gradient in a step; and weights that get no
        gradient while another parameter of the program does, or a thousandth of another's.
        UNUSED-PARAM, GRAD-ZERO and GRAD-VANISH report those.

    Thresholds:
        - high (0.1): torchmortem's upper bound, 100 times the 1e-3 that Karpathy calls healthy;
          smdebug's is 10, which no run survives. Healthy runs ended at 0.002 to 0.02.
        - low (1e-6): a thousandth of the healthy value. Healthy fine-tuning is below torchmortem's
          1e-5, and smdebug's 1e-8 is below the resolution of float32.
        - quantile (0.9): of the whole run, so that a weight that moved once is not reported.
        - window (40), min_samples (20): enough for a median, and short enough to see a late change.

    Severity:
        - warning: usually.
        - info: steps are too large, and every loss still falls at the end: its last quarter is
          below the one before by more than three standard errors.

    Evidence:
        Whether the updates are too large or too small, the ratios of the worst weights, the number
        of affected weights and of all weights, and the number of samples.

    Remedy:
        Too large: lower the learning rate, or raise it slowly over the first steps. Too small:
        raise the learning rate, check that the scheduler did not start at zero and that the
        gradient is not clipped or scaled to nothing. In bfloat16 and float16 an update below a
        thousandth of the weight is lost in rounding: keep float32 master weights.

    Cannot see:
        Whether a usual step is right for this model; parameters with fewer than two dimensions,
        and embeddings.
    """

    high: float = 0.1
    low: float = 1e-6
    quantile: float = 0.9
    window: int = 40
    min_samples: int = 20

    code = "UPDATE-RATIO"
    name = "steps change the weights too much, or hardly at all"
    severity = "warning"
    of_training = True
    follows: ClassVar[Mapping[str, str]] = {
        "large": (
            "INPUT-SCALE INIT-SCALE DOUBLE-SOFTMAX LOSS-BELOW-ZERO GRADS-KEPT "
            "RATE-TOO-LARGE GRAD-ZERO:all GRAD-EXPLODE"
        ),
        "small": (
            "NOT-OPTIMIZED GRADS-SHRUNK UNUSED-PARAM UNDERFLOW GRAD-ZERO:all DEAD-CHANNEL SATURATED GRAD-ZERO"
        ),
    }

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for too large and one for too small, for every root."""
        for _, own in weight_courses(recording).by_root(lambda weight: weight.update is not None):
            yield from self._too_large(own, falls=still_falls(recording))
            yield from self._too_small(own, trained=trains(recording))

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured updates; a recording without weights has nothing to judge."""
        updates = [w.update for w in weights(recording) if w.update is not None]
        if not updates:
            return None
        return too_few(self.code, measured(recording, updates), self.min_samples)

    def _too_large(self, own: WeightCourses, *, falls: bool) -> Iterator[Finding]:
        from_zero = ~(first_finites(own.size) >= FROM_ZERO)  # also those without a size
        grown = np.where(from_zero[:, None], np.nan, own.update)
        ratios = self._quantiles(grown, self.window, 0.5)
        large = np.flatnonzero(ratios > self.high)
        if len(large):
            worst = large[np.argmax(ratios[large])]
            others = large[large != worst]
            step = int(own.steps[(grown[worst] > self.high).argmax()])
            says = f"more than {self.high:g} times its size in half of the last optimizer steps"
            found = self._finding(own, ratios, [worst, *others], "large", says, step)
            if falls:
                message = f"{found.message} The loss still falls."
                found = replace(found, severity="info", message=message)
            yield found

    def _too_small(self, own: WeightCourses, *, trained: bool) -> Iterator[Finding]:
        usual = np.nan_to_num(finite_medians(own.gradient), nan=np.inf)
        starved = usual < STARVED * np.max(usual[np.isfinite(usual)], initial=0)
        starved |= np.array([weight.table for weight in own.weights])
        driven = np.where(starved[:, None] | (own.gradient == 0), np.nan, own.update)
        if trained:
            driven[~np.isfinite(own.gradient)] = np.nan
        ratios = self._quantiles(driven, len(own.steps), self.quantile)
        small = np.flatnonzero(ratios < self.low)
        if len(small):
            worst = small[np.argmin(ratios[small])]
            others = small[small != worst]
            step = int(own.steps[(driven[worst] < self.low).argmax()])
            says = (
                f"less than {self.low:g} times its size in {self.quantile:.0%} of the "
                "optimizer steps"
            )
            yield self._finding(own, ratios, [worst, *others], "small", says, step)

    def _quantiles(self, table: Floats, window: int, quantile: float) -> Floats:
        """Return a quantile of each weight's last ratios, NaN where there are too few."""
        found = np.full(len(table), np.nan)
        for place, row in enumerate(table):
            last = row[np.isfinite(row)][-window:]
            if len(last) >= self.min_samples:
                found[place] = np.quantile(last, quantile)
        return found

    def _finding(
        self,
        own: WeightCourses,
        ratios: Floats,
        outside: Sequence[int],
        kind: str,
        says: str,
        step: int,
    ) -> Finding:
        worst = outside[0]
        weight = own.weights[worst]
        others = ""
        if len(outside) > 1:
            others = f"; so did {len(outside) - 1} more of {len(own.weights)} weights"
        return Finding(
            code=self.code,
            severity=self.severity,
            site=(weight.update or weight.param).site,
            step=step,
            message=f"{weight.param.name} changed by {says} ({ratios[worst]:.2g}; "
            f"first seen at step {step}){others}.",
            evidence=UpdateRatioEvidence(
                kind=kind,
                ratios={own.weights[i].param.path: plain(ratios[i]) for i in outside[:NAMED]},
                weights=len(own.weights),
                concerned=len(outside),
                samples=int(np.isfinite(own.update[worst]).sum()),
                dtype=weight.param.dtype,
            ),
            confidence=0.8,
            remedy=_REMEDIES[kind],
        )


_REMEDIES = {
    "large": "Lower the learning rate, or raise it slowly over the first steps.",
    "small": "Raise the learning rate; check that the scheduler does not hold it at "
    "zero and that the gradient is not clipped or scaled to nothing. In bfloat16 and "
    "float16 an update below a thousandth of the weight is rounded away: keep "
    "float32 master weights.",
}

#: A weight smaller than this at its first sample was set to zero on purpose.
FROM_ZERO = 1e-6
