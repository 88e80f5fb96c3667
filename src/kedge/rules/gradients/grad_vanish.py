"""GRAD-VANISH: gradients over the depth of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kedge.rules.evidence import Evidence, places, said
from kedge.rules.naming import plain
from kedge.rules.recorded.roots import names_of
from kedge.rules.recorded.samples import too_few
from kedge.rules.recorded.weights import (
    Weight,
    WeightCourses,
    finite_median,
    middle,
    share,
    weight_courses,
)
from kedge.rules.rule import Finding, Lack, Rule
from kedge.store.recording import Recording
from kedge.store.rows import Floats


@dataclass(frozen=True, kw_only=True)
class GradVanishEvidence(Evidence):
    """How much less the first layers get and learn than the last, and the gradient of each."""

    ratio_of_output_gradients: float | None = said(
        "the first output gradients are {} times the last"
    )
    shallow_update_ratio: float | None = said("relative updates of the first third {}")
    deep_update_ratio: float | None = said("relative updates of the last third {}")
    profile: Mapping[str, float | None] = places(
        "gradient of each weight relative to its size", preferred=True
    )
    ratio: float | None = said("ratio {}")
    samples: int = said("{} measured steps")


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

    Cannot see:
        Models of fewer than min_weights weights; a fading that normalisation layers or Adam
        make up for; gradients that fade over the steps of one recurrent layer.
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
    of_training = True
    follows = "NEVER-INITIALISED INPUT-SCALE INIT-SCALE UNDERFLOW DEAD-CHANNEL SATURATED"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        for root, own in self._depths(recording):
            if self._vanishes(own):
                yield self._finding(recording, root, own)

    def idle(self, recording: Recording) -> str:
        """Return that the model has too few layers."""
        if not any(True for _ in self._depths(recording)):
            return "few layers"
        return ""

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured gradients; a model with few weights has no depth to judge."""
        have = min((len(own.steps) for _, own in self._depths(recording)), default=None)
        if have is None:
            return None
        return too_few(self.code, have, self.min_samples)

    def _depths(self, recording: Recording) -> Iterator[tuple[int, WeightCourses]]:
        """Yield the weights with gradients of each root that is deep enough, in the last steps that have gradients."""
        for root, own in weight_courses(recording).by_root(_has_depth):
            known = np.isfinite(own.gradient)
            seen = np.flatnonzero(known.any(axis=0))[-self.window :]
            alive = np.flatnonzero(known[:, seen].any(axis=1))
            if len(alive) >= self.min_weights:
                yield root, own.part(alive, seen)

    def _vanishes(self, own: WeightCourses) -> bool:
        gradient = _contrast(own.gradient)
        arriving = _contrast(own.arriving)
        samples = int(np.isfinite(gradient).sum())
        hopeless = bool((gradient < self.hopeless).all())
        enough = self.few if hopeless else self.min_samples
        if samples < enough or not 0 < np.nanmedian(gradient) < self.ratio:
            return False
        if np.isfinite(arriving).sum() >= enough and np.nanmedian(arriving) >= self.ratio:
            return False
        return bool(np.nanmedian(gradient) < self.hopeless) or self._is_still(own)

    def _is_still(self, own: WeightCourses) -> bool:
        shallow, deep = (finite_median(part) for part in _thirds(own.update))
        return np.isnan(shallow) or shallow < self.still or shallow < self.slow * deep

    def _finding(self, recording: Recording, root: int, own: WeightCourses) -> Finding:
        contrast = _contrast(own.gradient)
        samples = int(np.isfinite(contrast).sum())
        ratio = float(np.nanmedian(contrast))
        first = own.weights[0]
        last = own.weights[len(own.weights) // 3 - 1]
        step = int(own.steps[(contrast < self.ratio).argmax()])
        shallow, deep = (plain(finite_median(part)) for part in _thirds(own.update))
        profile = {
            weight.param.path: plain(finite_median(row))
            for weight, row in zip(own.weights, own.gradient, strict=True)
        }
        confidence = 0.7
        if np.isfinite(own.update).any() and np.isfinite(own.arriving).any():
            confidence = 0.9
        return Finding(
            code=self.code,
            severity=self.severity,
            site=(first.grad or first.param).site,
            step=step,
            message=f"The first third of the layers of {names_of(recording, [root])} "
            f"({first.param.name} to {last.param.name}) hardly learns: its gradient "
            f"relative to the weights is {ratio:.1e} times that of the last third "
            f"(median of {samples} measured steps, from step {step} on).",
            evidence=GradVanishEvidence(
                ratio_of_output_gradients=plain(finite_median(_contrast(own.arriving))),
                shallow_update_ratio=shallow,
                deep_update_ratio=deep,
                profile=profile,
                ratio=plain(ratio),
                samples=samples,
            ),
            confidence=confidence,
            remedy="Replace sigmoid and tanh, if there are any, by ReLU or GELU, and "
            "initialise the weights to fit the activation "
            "(torch.nn.init.kaiming_normal_ for ReLU, xavier_normal_ for tanh). If "
            "that is not enough, add normalisation, such as BatchNorm or LayerNorm, "
            "or residual connections.",
        )


def _has_depth(weight: Weight) -> bool:
    """Whether a weight has a gradient in every step, which shows how far gradients come."""
    return weight.grad is not None and not weight.table


def _thirds(table: Floats) -> tuple[Floats, Floats]:
    """Return the rows of the first and of the last third of the weights."""
    third = len(table) // 3
    return table[:third], table[len(table) - third :]


def _contrast(table: Floats) -> Floats:
    """Return the first third's median over the last third's, for each step."""
    shallow, deep = _thirds(table)
    return share(middle(shallow), middle(deep))
