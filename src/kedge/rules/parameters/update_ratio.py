"""UPDATE-RATIO: the relative change of the weights in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kedge.rules.naming import NAMED, plain
from kedge.rules.recorded.roots import by_root
from kedge.rules.recorded.samples import measured, too_few
from kedge.rules.recorded.trained import trains
from kedge.rules.recorded.weights import Weight, finite_medians, first_finites, rms, share, weights
from kedge.rules.rule import Finding, Lack, Severity
from kedge.store.recording import Recording
from kedge.store.rows import Bools, Floats, Ints


@dataclass(frozen=True)
class UpdateRatio:
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

    Evidence:
        Whether the updates are too large or too small, the ratios of the worst weights, the number
        of affected weights and of all weights, and the number of samples.

    Remedy:
        Too large: lower the learning rate, or raise it slowly over the first steps. Too small:
        raise the learning rate, check that the scheduler did not start at zero and that the
        gradient is not clipped or scaled to nothing. In bfloat16 and float16 an update below a
        thousandth of the weight is lost in rounding: keep float32 master weights.
    """

    high: float = 0.1
    low: float = 1e-6
    quantile: float = 0.9
    window: int = 40
    min_samples: int = 20

    code: ClassVar[str] = "UPDATE-RATIO"
    name: ClassVar[str] = "steps change the weights too much, or hardly at all"
    severity: ClassVar[Severity] = "warning"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for too large and one for too small, for every root."""
        known = [w for w in weights(recording) if w.update is not None]
        for _, group in by_root(known, lambda w: w.root):
            own = _Ratios.of(recording, group)
            large = own.judge(own.grown, self.window, 0.5, self.min_samples)
            small = own.judge(own.driven, len(recording.steps), self.quantile, self.min_samples)
            yield from self._too_large(own, large)
            yield from self._too_small(own, small)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured updates; a recording without weights has nothing to judge."""
        updates = [w.update for w in weights(recording) if w.update is not None]
        return (
            too_few(self.code, measured(recording, updates), self.min_samples) if updates else None
        )

    def _too_large(self, own: _Ratios, ratios: Floats) -> Iterator[Finding]:
        outside = np.flatnonzero(ratios > self.high)
        if len(outside):
            worst = outside[np.argmax(ratios[outside])]
            says = f"changed by more than {self.high:g} times its size in half of the last optimizer steps"
            step = own.first_step(worst, own.grown[worst] > self.high)
            words = (says, _TOO_LARGE, "large", step)
            yield self._finding(own, ratios, [worst, *outside[outside != worst]], words)

    def _too_small(self, own: _Ratios, ratios: Floats) -> Iterator[Finding]:
        outside = np.flatnonzero(ratios < self.low)
        if len(outside):
            worst = outside[np.argmin(ratios[outside])]
            says = f"changed by less than {self.low:g} times its size in {self.quantile:.0%} of the optimizer steps"
            step = own.first_step(worst, own.driven[worst] < self.low)
            words = (says, _TOO_SMALL, "small", step)
            yield self._finding(own, ratios, [worst, *outside[outside != worst]], words)

    def _finding(
        self, own: _Ratios, ratios: Floats, outside: Sequence[int], words: tuple[str, str, str, int]
    ) -> Finding:
        says, remedy, kind, step = words
        first = own.weights[outside[0]]
        others = (
            f"; so did {len(outside) - 1} more of {len(own.weights)} weights"
            if len(outside) > 1
            else ""
        )
        return Finding(
            code=self.code,
            severity=self.severity,
            site=(first.update or first.param).site,
            step=step,
            message=f"{first.param.path} {says} ({ratios[outside[0]]:.2g}; first seen at step {step}){others}.",
            evidence={
                "kind": kind,
                "ratios": {own.weights[i].param.path: plain(ratios[i]) for i in outside[:NAMED]},
                "weights": len(own.weights),
                "concerned": len(outside),
                "samples": int(np.isfinite(own.table[outside[0]]).sum()),
                "dtype": first.param.dtype,
            },
            confidence=0.8,
            remedy=remedy,
        )


_TOO_LARGE = "Lower the learning rate, or raise it slowly over the first steps."
_TOO_SMALL = (
    "Raise the learning rate; check that the scheduler does not hold it at zero and that the gradient is not clipped "
    "or scaled to nothing. In bfloat16 and float16 an update below a thousandth of the weight is rounded away: "
    "keep float32 master weights."
)


@dataclass(frozen=True)
class _Ratios:
    """Update ratios: a row a weight, a column a measured step.

    ``grown`` has no values for weights that started at zero, ``driven`` none for embeddings, for
    weights that hardly get a gradient, and for steps whose gradient was zero or missing.
    """

    weights: list[Weight]
    steps: Ints
    table: Floats
    grown: Floats
    driven: Floats

    @classmethod
    def of(cls, recording: Recording, own: list[Weight]) -> _Ratios:
        """Return the ratios of some weights."""
        size = rms(recording, [w.param for w in own])
        gradient = share(rms(recording, [w.grad for w in own]), size)
        table = share(rms(recording, [w.update for w in own]), size)
        from_zero = ~(first_finites(size) >= FROM_ZERO)  # also those without a size
        usual = np.nan_to_num(finite_medians(gradient), nan=np.inf)
        starved = np.array([w.table for w in own]) | (
            usual < STARVED * np.max(usual[np.isfinite(usual)], initial=0)
        )
        grown = np.where(from_zero[:, None], np.nan, table)
        driven = np.where(starved[:, None] | (gradient == 0), np.nan, table)
        if trains(recording):
            driven[~np.isfinite(gradient)] = np.nan
        return cls(own, recording.steps, table, grown, driven)

    def judge(self, table: Floats, window: int, quantile: float, enough: int) -> Floats:
        """Return a quantile of each weight's last ratios, NaN where there are too few."""
        known = np.isfinite(table)
        result = np.full(len(table), np.nan)
        for place in np.flatnonzero(np.minimum(known.sum(axis=1), window) >= enough):
            result[place] = np.quantile(table[place][known[place]][-window:], quantile)
        return result

    def first_step(self, weight: int, outside: Bools) -> int:
        """Return the first step in which a weight's ratio was outside its bounds."""
        return int(self.steps[np.flatnonzero(outside & np.isfinite(self.table[weight]))[0]])


#: A weight smaller than this at its first sample was set to zero on purpose.
FROM_ZERO = 1e-6

#: Weights with a relative gradient below this share of the largest one's hardly get a gradient.
STARVED = 1e-3
