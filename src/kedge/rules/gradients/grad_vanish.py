"""GRAD-VANISH: gradients over the depth of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kedge.rules.naming import plain
from kedge.rules.recorded.roots import by_root, names_of
from kedge.rules.recorded.samples import too_few
from kedge.rules.recorded.weights import Weight, finite_median, middle, rms, share, weights
from kedge.rules.rule import Finding, Lack, Rule, Words
from kedge.store.recording import Recording
from kedge.store.rows import Floats, Ints


@dataclass(frozen=True)
class GradVanish(Rule):
    """The gradient fades on its way to the first layers, so that they do not learn.

    Meaning:
        The weights of the first third of the layers get gradients that are orders of magnitude
        smaller than those of the last third, and hardly change. On its way back the gradient is
        multiplied once per layer, by the weights and by the slope of the activation, which is at
        most 1/4 for a sigmoid; many factors below one leave nothing.

    Formula:
        For every weight r = rms(gradient) / rms(weight), and a = rms(gradient of its module's
        output). In each measured step R = median of r over the first third / median of r over the
        last third, in the order of the layers, and A likewise. Reported if median(R) < ratio and
        median(A) < ratio, and if the weights of the first third hardly change: the median of
        rms(update) / rms(weight) there is below still, or below slow times that of the last third.
        If median(R) < hopeless, this last condition is dropped, and few samples are enough.

        Two measures have to agree because each alone has healthy exceptions: a is small where a
        layer is wide or an image is large, r where most of a weight is unused in a step. A gradient
        that is exactly zero has not faded: GRAD-ZERO reports it.

    Window:
        The last window measured steps with gradients, at least min_samples. Weights are parameters
        with two or more dimensions; embeddings are left out, because most of their rows get no
        gradient in a step. The model must have min_weights weights with gradients.

    Thresholds:
        - ratio (1e-3): three orders of magnitude between the thirds. torchmortem reports a ratio of
          100 between two layers and calls 1,000 critical. Fixed limits (smdebug: mean |gradient| <
          1e-7) depend on the scale of the loss and on the dtype, so this rule has none.
        - still (1e-6): a thousandth of the update ratio of 1e-3 that Karpathy calls healthy.
        - slow (1e-2): a hundredth of that of the last third.
        - hopeless (1e-6): ten sigmoid layers reach 1e-7, and do not learn with Adam either.
        - min_samples (20), window (100): enough for a median.
        - few (5): samples, if the gradient is hopeless in each of them.
        - min_weights (6): so that each third has two weights.

    Evidence:
        Both ratios, the update ratios of the two thirds, the number of samples, and the profile of
        r over the depth.

    Remedy:
        Replace sigmoid and tanh, if there are any, by ReLU or GELU, and initialise the weights to
        fit the activation (torch.nn.init.kaiming_normal_ for ReLU, xavier_normal_ for tanh). If
        that is not enough, add normalisation, such as BatchNorm or LayerNorm, or residual
        connections.
    """

    ratio: float = 1e-3
    still: float = 1e-6
    slow: float = 1e-2
    hopeless: float = 1e-6
    min_samples: int = 20
    few: int = 5
    window: int = 100
    min_weights: int = 6

    code = "GRAD-VANISH"
    name = "the gradient fades before it reaches the first layers"
    severity = "warning"
    follows = "NEVER-INITIALISED INPUT-SCALE INIT-SCALE UNDERFLOW DEAD-CHANNEL SATURATED"
    captions: ClassVar[Mapping[str, str]] = {
        "profile": "gradient of each weight relative to its size"
    }
    words: ClassVar[Words] = {
        "ratio": "ratio {}",
        "ratio_of_output_gradients": "the first output gradients are {} times the last",
        "shallow_update_ratio": "relative updates of the first third {}",
        "deep_update_ratio": "relative updates of the last third {}",
    }

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        for root, depth in self._depths(recording):
            if self._vanishes(depth):
                yield self._finding(recording, root, depth)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured gradients; a model with few weights has no depth to judge."""
        samples = [
            int(np.isfinite(depth.relative).any(axis=0).sum())
            for _, depth in self._depths(recording)
        ]
        return too_few(self.code, min(samples), self.min_samples) if samples else None

    def _depths(self, recording: Recording) -> Iterator[tuple[int, _Depth]]:
        """Yield the weights of each root that is deep enough."""
        usable = [w for w in weights(recording) if w.grad is not None and not w.table]
        for root, group in by_root(usable, lambda w: w.root):
            depth = _Depth.of(recording, group, self.window)
            if depth is not None and len(depth.weights) >= self.min_weights:
                yield root, depth

    def _vanishes(self, depth: _Depth) -> bool:
        gradient, arriving = depth.contrast(depth.relative), depth.contrast(depth.arriving)
        samples, hopeless = int(np.isfinite(gradient).sum()), bool((gradient < self.hopeless).all())
        enough = self.few if hopeless else self.min_samples
        if samples < enough or not 0 < np.nanmedian(gradient) < self.ratio:
            return False
        if np.isfinite(arriving).sum() >= enough and np.nanmedian(arriving) >= self.ratio:
            return False
        return bool(np.nanmedian(gradient) < self.hopeless) or self._still(depth)

    def _still(self, depth: _Depth) -> bool:
        shallow, deep = (finite_median(depth.updates[part]) for part in (depth.shallow, depth.deep))
        return np.isnan(shallow) or shallow < self.still or shallow < self.slow * deep

    def _finding(self, recording: Recording, root: int, depth: _Depth) -> Finding:
        contrast = depth.contrast(depth.relative)
        samples = int(np.isfinite(contrast).sum())
        ratio, first, last = (
            float(np.nanmedian(contrast)),
            depth.weights[0],
            depth.weights[depth.shallow.stop - 1],
        )
        step = int(depth.steps[np.flatnonzero(contrast < self.ratio)[0]])
        return Finding(
            code=self.code,
            severity=self.severity,
            site=(first.grad or first.param).site,
            step=step,
            message=f"The first third of the layers of {names_of(recording, [root])} ({first.param.path} to "
            f"{last.param.path}) hardly learns: its gradient relative to the weights is {ratio:.1e} times that of the last "
            f"third (median of {samples} measured steps, from step {step} on).",
            evidence=depth.evidence() | {"ratio": plain(ratio), "samples": samples},
            confidence=0.9
            if np.isfinite(depth.updates).any() and np.isfinite(depth.arriving).any()
            else 0.7,
            remedy="Replace sigmoid and tanh, if there are any, by ReLU or GELU, and initialise the weights to fit the "
            "activation (torch.nn.init.kaiming_normal_ for ReLU, xavier_normal_ for tanh). If that is not enough, add "
            "normalisation, such as BatchNorm or LayerNorm, or residual connections.",
        )


@dataclass(frozen=True)
class _Depth:
    """The weights of one root in the order of depth; tables have a row a weight, a column a step."""

    weights: list[Weight]
    steps: Ints
    relative: Floats
    arriving: Floats
    updates: Floats

    @classmethod
    def of(cls, recording: Recording, group: list[Weight], window: int) -> _Depth | None:
        """Return the last steps that have gradients; None if there are none."""
        size = rms(recording, [w.param for w in group])
        relative = share(rms(recording, [w.grad for w in group]), size)
        seen = np.flatnonzero(np.isfinite(relative).any(axis=0))[-window:]
        alive = np.flatnonzero(np.isfinite(relative[:, seen]).any(axis=1))
        if not len(seen):
            return None
        group = [group[i] for i in alive]
        arriving = rms(recording, [w.arriving for w in group])
        updates = share(rms(recording, [w.update for w in group])[:, seen], size[alive][:, seen])
        return cls(
            group, recording.steps[seen], relative[alive][:, seen], arriving[:, seen], updates
        )

    @property
    def shallow(self) -> slice:
        return slice(0, len(self.weights) // 3)

    @property
    def deep(self) -> slice:
        return slice(len(self.weights) - len(self.weights) // 3, len(self.weights))

    def contrast(self, table: Floats) -> Floats:
        """Return the shallow third's median over the deep third's, for each step."""
        return share(middle(table[self.shallow]), middle(table[self.deep]))

    def evidence(self) -> dict[str, Any]:
        """Return the figures of both thirds and the gradient of each weight over the depth."""
        arriving = self.contrast(self.arriving)
        return {
            "ratio_of_output_gradients": plain(finite_median(arriving)),
            "shallow_update_ratio": plain(finite_median(self.updates[self.shallow])),
            "deep_update_ratio": plain(finite_median(self.updates[self.deep])),
            "profile": {
                w.param.path: plain(finite_median(row))
                for w, row in zip(self.weights, self.relative, strict=True)
            },
        }
