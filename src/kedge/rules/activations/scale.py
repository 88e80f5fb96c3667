"""The scale of activations: over the depth at the start, and over the steps of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kedge.rules.naming import NAMED, plain
from kedge.rules.rule import Finding, Lack, Severity
from kedge.rules.samples import measured, too_few
from kedge.rules.weights import weights
from kedge.rules.wiring import wire
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Floats, Ints


@dataclass(frozen=True)
class InitScale:
    """At the start the signal grows or shrinks from layer to layer: the initialisation does not fit.

    What it says:
        Each layer multiplies the scale of what it is given by the same factor, so that over the depth it explodes or
        dies away. Gradients do the same on their way back.

    Formula:
        For every module with a weight a = log2 rms(output) in the first sampled step, in the order in which
        they return. T = Theil-Sen slope of a over that order * (number - 1): the doublings from the first to
        the last. rho = Spearman's rank correlation of a with the order. Reported if |T| > doublings and
        |rho| > steady. A block that is repeated, as in a transformer, goes up and down and has no trend.

    Window:
        The first sampled step, if it is one of the first few; min_weights modules with a weight, embeddings
        left out, and outputs that are zero throughout, as those of a branch that starts at zero.

    Thresholds:
        - doublings (6): a factor of 64 in the scale, 4,096 in the variance. smdebug reports a
          factor of 10 in the variance of any two layers, which every transformer has. Healthy networks came to 3.5
          (a plain CNN with PyTorch's own initialisation), ones with an unfit initialisation to 11 and more.
        - steady (0.8): the trend is that of nearly all layers, and not of one that is scaled on purpose.
        - min_weights (4): fewer have no trend.
        - first (10): the step up to which one speaks of a start.

    Evidence:
        The doublings over the depth, the rank correlation, the factor from layer to layer, and the profile.

    Remedy:
        Use the initialisation that fits the activation (torch.nn.init.kaiming_normal_ for ReLU, xavier_normal_ for tanh),
        add normalisation or residual connections, and feed inputs of unit variance.
    """

    doublings: float = 6.0
    steady: float = 0.8
    min_weights: int = 4
    first: int = 10

    code: ClassVar[str] = "INIT-SCALE"
    name: ClassVar[str] = "at the start the signal grows or shrinks with depth"
    severity: ClassVar[Severity] = "warning"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give at most one finding for every root."""
        profile = _profile(recording, self.first)
        for root in sorted({site.root for site in profile}):
            own = {site: scale for site, scale in profile.items() if site.root == root}
            scales = np.array(list(own.values()))
            if len(own) < self.min_weights:
                continue
            slope, steadiness = _slope(np.arange(len(own), dtype=np.int64), scales), _ranked(scales)
            if abs(slope) * (len(own) - 1) > self.doublings and abs(steadiness) > self.steady:
                yield self._finding(recording, own, slope, steadiness)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return that the start was not measured; a model with few weights has no depth to judge."""
        sites = _weighted(recording)
        early = len(recording.steps) and recording.steps[0] <= self.first
        if early or max((sum(site.root == root for site in sites) for root in {s.root for s in sites}), default=0) < (
            self.min_weights
        ):
            return None
        return Lack(self.code, f"measured step among the first {self.first}", 0, 1)

    def _finding(self, recording: Recording, own: dict[SiteInfo, float], slope: float, steadiness: float) -> Finding:
        sites, scales = list(own), list(own.values())
        first, last, root = sites[0], sites[-1], sites[0].root
        model = recording.roots[root].name if root < len(recording.roots) else "the model"
        step = int(recording.steps[0])
        return Finding(
            code=self.code,
            severity=self.severity,
            site=last.site,
            step=step,
            message=f"At step {step} the scale of the outputs of {model} {'grows' if slope > 0 else 'shrinks'} by a factor of "
            f"{2 ** abs(slope):.2g} from layer to layer: from {2 ** scales[0]:.2g} at {first.site} to "
            f"{2 ** scales[-1]:.2g} at {last.site}.",
            evidence={
                "doublings": plain(slope * (len(own) - 1)),
                "factor": plain(2**slope),
                "rank_correlation": plain(steadiness),
                "profile": {site.site: plain(2**scale) for site, scale in own.items()},
            },
            confidence=0.9,
            remedy="Use the initialisation that fits the activation (kaiming_normal_ for ReLU, xavier_normal_ for tanh), "
            "add normalisation or residual connections, and feed inputs of unit variance.",
        )


@dataclass(frozen=True)
class ScaleDrift:
    """The scale of an activation moves steadily, and does not come to rest.

    What it says:
        Outputs that keep doubling end in overflow, in saturation or in logits without a gradient; outputs that keep
        halving, in nothing. A healthy run moves them most at its start, and less and less.

    Formula:
        a(t) = log2 rms(output) of a module with a weight, over the second half of the steps. D = the
        Theil-Sen slope of a over the steps. Reported if |D| > slope per 1,000 steps, if |D| times the
        length of that half > doublings, and if it moved all the time and has not come to rest: cut into eight
        parts, a nowhere leaves the line of slope D by more than straight times the doublings.

    Window:
        The second half of the run, at least min_samples sampled steps of it.

    Thresholds:
        - slope (0.5): doublings per 1,000 steps; a drift that takes longer belongs to learning.
        - doublings (3): a factor of eight, within half a run. Healthy runs of 160 to 800 steps that
          did not slow down moved by 2.0 at the most, in the logits of a run with a very small learning rate.
        - straight (0.1): of the height of the line. Healthy runs that leave a plateau move by up to 9.3 doublings and
          then slow down: they left it by 0.15 and more, runs with a planted drift by 0.05 or less.
        - min_samples (10): for the second half; where most samples lie before it, these are the last ones.

    Evidence:
        The slope, the doublings, the scale at both ends, and how many other modules drift.

    Remedy:
        Add normalisation or weight decay, lower the learning rate, and look for what is scaled again and again: a
        running statistic, a residual branch without a norm, a weight without decay.
    """

    slope: float = 0.5
    doublings: float = 3.0
    straight: float = 0.1
    min_samples: int = 10

    code: ClassVar[str] = "SCALE-DRIFT"
    name: ClassVar[str] = "the scale of an activation moves and does not come to rest"
    severity: ClassVar[Severity] = "warning"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give at most one finding for every root: the module that drifts fastest."""
        drifts = [drift for site in _weighted(recording) if (drift := self._drift(recording, site))]
        for root in sorted({drift.site.root for drift in drifts}):
            own = sorted((d for d in drifts if d.site.root == root), key=lambda d: -abs(d.slope))
            yield self._finding(own)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return how many measured outputs are missing for both halves of the run."""
        sites = _weighted(recording)
        return too_few(self.code, measured(recording, sites), 2 * self.min_samples - 1) if sites else None

    def _drift(self, recording: Recording, site: SiteInfo) -> _Drift | None:
        steps, scales = recording.steps, _log(recording.series(site, "rms"))
        known = np.isfinite(scales)
        steps, scales = steps[known], scales[known]
        if len(steps) < 2 * self.min_samples - 1:
            return None
        start = min(int(np.searchsorted(steps, (steps[0] + steps[-1]) / 2)), len(steps) - self.min_samples)
        steps, scales = steps[start:], scales[start:]
        thinned = slice(None, None, -(-len(steps) // _POINTS))
        steps, scales = steps[thinned], scales[thinned]
        slope = _slope(steps, scales)
        length = float(steps[-1] - steps[0])
        fast = abs(slope) * 1000 > self.slope and abs(slope) * length > self.doublings
        if not fast or _bent(steps, scales, slope) > self.straight * abs(slope) * length:
            return None
        return _Drift(site, slope, length, steps[0], scales)

    def _finding(self, own: list[_Drift]) -> Finding:
        worst = own[0]
        start, end = 2 ** float(worst.scales[0]), 2 ** float(worst.scales[-1])
        others = f"; so do {len(own) - 1} more modules" if len(own) > 1 else ""
        return Finding(
            code=self.code,
            severity=self.severity,
            site=worst.site.site,
            step=int(worst.first),
            message=f"{worst.site.site} {'grew' if worst.slope > 0 else 'shrank'} from {start:.3g} to {end:.3g} (rms) since step "
            f"{worst.first}, {abs(worst.slope) * 1000:.2g} doublings per 1,000 steps, and has not come to rest{others}.",
            evidence={
                "doublings_per_1000_steps": plain(worst.slope * 1000),
                "doublings": plain(worst.slope * worst.length),
                "sites": {drift.site.site: plain(drift.slope * 1000) for drift in own[:NAMED]},
                "course": [plain(2**scale) for scale in worst.scales[-NAMED:]],
            },
            confidence=0.8,
            remedy="Add normalisation or weight decay, lower the learning rate, and look for what is scaled again and again: "
            "a running statistic, a residual branch without a norm.",
        )


@dataclass(frozen=True)
class _Drift:
    """A site whose scale moves: by so many doublings a step, from a first step on."""

    site: SiteInfo
    slope: float
    length: float
    first: int
    scales: Floats


def _weighted(recording: Recording) -> list[SiteInfo]:
    """List the outputs of the modules that have a weight, in the order in which they return."""
    modules = wire(recording).modules
    owners = {w.param.owner: modules[w.param.owner] for w in weights(recording) if not w.table}
    return [recording.sites[module.outs[0]] for module in owners.values() if module.outs]


def _profile(recording: Recording, first: int) -> dict[SiteInfo, float]:
    """Give the scale of every module with a weight in the first sampled step, as a power of two."""
    if not len(recording.steps) or recording.steps[0] > first:
        return {}
    found = {site: float(_log(recording.series(site, "rms"))[0]) for site in _weighted(recording)}
    return {site: scale for site, scale in found.items() if np.isfinite(scale)}


def _log(scales: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log2(scales))


#: So many points are enough for a slope; it looks at all pairs.
_POINTS = 200


def _slope(x: Floats | Ints, y: Floats) -> float:
    """Give the median of the slopes between all pairs of points, which no outlier moves."""
    i, j = np.triu_indices(len(x), k=1)
    return float(np.median((y[j] - y[i]) / (x[j] - x[i]))) if len(i) else 0.0


def _bent(x: Ints, y: Floats, slope: float) -> float:
    """Give how far a course leaves a line of some slope, by the medians of its eighths."""
    rest = y - slope * x
    return max(abs(float(np.median(part) - np.median(rest))) for part in np.array_split(rest, 8))


def _ranked(y: Floats) -> float:
    """Give Spearman's rank correlation of values with their order."""
    ranks = np.argsort(np.argsort(y))
    return float(np.corrcoef(np.arange(len(y)), ranks)[0, 1])
