"""INIT-SCALE: the scale of activations over the depth, at the start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kedge.rules.activations.trends import log2, outputs_of_weights, theil_sen
from kedge.rules.evidence import Evidence, places, said
from kedge.rules.naming import plain
from kedge.rules.recorded.roots import by_root, names_of
from kedge.rules.rule import Finding, Lack, Rule
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Floats


@dataclass(frozen=True, kw_only=True)
class InitScaleEvidence(Evidence):
    """How the scale changes from layer to layer, and that of each layer's output."""

    doublings: float | None = said("{} doublings")
    factor: float | None = said("a factor of {} from layer to layer")
    rank_correlation: float | None = said("rank correlation {}")
    profile: Mapping[str, float | None] = places(
        "root mean square of each layer's output", preferred=True
    )


@dataclass(frozen=True)
class InitScale(Rule):
    """At the start, the signal grows or shrinks from layer to layer: the initialisation does not fit.

    Meaning:
        Each layer multiplies the scale of its input by the same factor, so that the signal explodes
        or fades over the depth. Gradients do the same on their way back.

    Formula:
        For every module with a weight, a = log2 rms(output) in the first measured step, in the
        order in which the modules return. T = Theil-Sen slope of a over that order * (number - 1):
        the doublings from the first to the last. rho = Spearman's rank correlation of a with the
        order. Reported if |T| > doublings and |rho| > steady. A repeated block, as in a
        transformer, goes up and down and has no trend.

    Window:
        The first measured step, if it is one of the first few; min_weights modules with a weight.
        Embeddings are left out, and so are outputs of zeros, such as those of a branch that starts
        at zero.

    Thresholds:
        - doublings (6): a factor of 64 in the scale, 4,096 in the variance. smdebug reports a
          factor of 10 between the variances of any two layers, which every transformer has. Healthy
          networks reached 3.5 (a plain CNN with PyTorch's own initialisation), networks with an
          unsuitable initialisation 11 and more.
        - steady (0.8): nearly all layers follow the trend, not only one that is scaled on purpose.
        - min_weights (4): fewer have no trend.
        - first (10): the last step that counts as the start.

    Evidence:
        The doublings over the depth, the rank correlation, the factor from layer to layer, and the
        scale of each layer.

    Remedy:
        Use the initialisation that fits the activation (torch.nn.init.kaiming_normal_ for ReLU,
        xavier_normal_ for tanh), add normalisation or residual connections, and feed inputs of unit
        variance.

    Cannot see:
        An initialisation that normalisation layers make up for; models of few layers; a first
        step that was not watched.
    """

    doublings: float = 6.0
    steady: float = 0.8
    min_weights: int = 4
    first: int = 10

    code = "INIT-SCALE"
    name = "at the start the signal grows or shrinks with depth"
    severity = "warning"
    of_training = True
    of_the_beginning = True
    follows = "NEVER-INITIALISED"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        profile = _profile(recording, self.first)
        for _, sites in by_root(profile, lambda site: site.root):
            own = {site: profile[site] for site in sites}
            scales = np.array(list(own.values()))
            if len(own) < self.min_weights:
                continue
            slope = theil_sen(np.arange(len(own), dtype=np.int64), scales)
            steadiness = _ranked(scales)
            if abs(slope) * (len(own) - 1) > self.doublings and abs(steadiness) > self.steady:
                yield self._finding(recording, own, slope, steadiness)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of a measured start; a model with few weights has no depth to judge."""
        groups = by_root(outputs_of_weights(recording), lambda site: site.root)
        early = len(recording.steps) and recording.steps[0] <= self.first
        deep = any(len(sites) >= self.min_weights for _, sites in groups)
        if early or not deep:
            return None
        return Lack(self.code, f"measured step among the first {self.first}", 0, 1)

    def _finding(
        self, recording: Recording, own: dict[SiteInfo, float], slope: float, steadiness: float
    ) -> Finding:
        sites = list(own)
        scales = list(own.values())
        first = sites[0]
        last = sites[-1]
        model = names_of(recording, [first.root])
        step = int(recording.steps[0])
        changes = "shrinks"
        if slope > 0:
            changes = "grows"
        return Finding(
            code=self.code,
            severity=self.severity,
            site=last.site,
            step=step,
            message=f"At step {step} the scale of the outputs of {model} "
            f"{changes} by a factor of "
            f"{2 ** abs(slope):.2g} from layer to layer: from {2 ** scales[0]:.2g} at "
            f"{first.site} to {2 ** scales[-1]:.2g} at {last.site}.",
            evidence=InitScaleEvidence(
                doublings=plain(slope * (len(own) - 1)),
                factor=plain(2**slope),
                rank_correlation=plain(steadiness),
                profile={site.site: plain(2**scale) for site, scale in own.items()},
            ),
            confidence=0.9,
            remedy="Use the initialisation that fits the activation (kaiming_normal_ "
            "for ReLU, xavier_normal_ for tanh), add normalisation or residual "
            "connections, and feed inputs of unit variance.",
        )


def _profile(recording: Recording, first: int) -> dict[SiteInfo, float]:
    """Return the scale of every module with a weight in the first measured step, as a power of two."""
    if not len(recording.steps) or recording.steps[0] > first:
        return {}
    sites = outputs_of_weights(recording)
    scales = log2(recording.matrix(sites, "rms")[:, 0])
    return {sites[i]: float(scales[i]) for i in np.flatnonzero(np.isfinite(scales))}


def _ranked(y: Floats) -> float:
    """Return Spearman's rank correlation of values with their order."""
    ranks = np.argsort(np.argsort(y))
    return float(np.corrcoef(np.arange(len(y)), ranks)[0, 1])
