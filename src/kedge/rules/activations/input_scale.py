"""INPUT-SCALE: inputs that are far too large or too small for the first layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kedge.rules.evidence import Evidence, said
from kedge.rules.naming import plain
from kedge.rules.recorded.roots import names_of, root_path
from kedge.rules.recorded.samples import too_few
from kedge.rules.recorded.weights import (
    WeightCourses,
    finite_median,
    finite_medians,
    first_finites,
    rms,
    weight_courses,
)
from kedge.rules.recorded.wiring import ModuleSites, wire
from kedge.rules.rule import Finding, Lack, Rule
from kedge.store.recording import Recording, SiteInfo


@dataclass(frozen=True, kw_only=True)
class InputScaleEvidence(Evidence):
    """The sizes of the first layer's input, output and gradient."""

    input: float | None = said("input {}")
    output: float | None = said("output {}")
    gradient_to_others: float | None = said("its gradient is {} times that of the others")
    samples: int = said("{} measured steps")


@dataclass(frozen=True)
class InputScale(Rule):
    """The inputs are not scaled: they are far from the scale that the initialisation of layers expects.

    Meaning:
        Initialisations and learning rates are made for inputs with a variance of about one. Pixels
        from 0 to 255, prices or times in seconds make the first layer's outputs and gradients
        larger by the same factor, so that no learning rate fits all layers. If inputs are far too
        small, such as pixels that were divided by 255 three times, only the biases reach the
        outputs.

    Formula:
        x = the median over the measured steps of rms(input), for the first module with a weight and
        for the model's own input.

        Too large: both > scale; the input was so in the first measured step too (otherwise a
        trained model made it large); and that module shows it: the median rms of its output >
        output, or its gradient relative to its size > gradient times the median of those of the
        other weights.

        Too small: both, and the input in the first step, are < small and not zero.

        Whole numbers are indices and are not judged.

    Window:
        All measured steps, at least min_samples.

    Thresholds:
        - scale (50): images of handwritten digits from 0 to 255 have 79 to 85, photographs 120 to
          150. Scaled inputs have 0.3 to 2.
        - output (10): layers of healthy networks return 0.1 to 3 at the start.
        - gradient (10): the same factor, because the gradient of a weight is as large as its input.
        - small (1e-4): a thirtieth of sqrt(1e-5), which normalisations add to a standard deviation,
          so such an input has no effect beside it. Sparse features, such as words or citations,
          have 0.003 to 0.01.
        - min_samples (3): enough for a median.

    Evidence:
        The scale of the input and of the output of the first module, and the relative gradients.

    Remedy:
        Scale the inputs: subtract the mean and divide by the standard deviation of the training
        data, or divide pixels by 255.

    Cannot see:
        One feature among many whose scale is far from that of the others; inputs that are
        shifted but not too large; wrong order of channels or units.
    """

    scale: float = 50.0
    output: float = 10.0
    gradient: float = 10.0
    small: float = 1e-4
    min_samples: int = 3

    code = "INPUT-SCALE"
    name = "the inputs are not scaled"
    severity = "warning"
    of_training = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        for entry in _entries(recording):
            sizes = [_usual(recording, entry.inputs), _first(recording, entry.inputs)]
            if entry.heads:
                sizes.append(_usual(recording, entry.heads))
            if entry.samples < self.min_samples:
                continue
            if all(0 < size < self.small for size in sizes):
                yield self._finding(
                    recording, entry, sizes[0], ["so small has no effect beside its biases"]
                )
            elif all(size > self.scale for size in sizes) and (
                shown := self._shown(recording, entry)
            ):
                yield self._finding(recording, entry, sizes[0], shown)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured inputs; without float inputs there is nothing to judge."""
        samples = [entry.samples for entry in _entries(recording) if entry.samples]
        if not samples:
            return None
        return too_few(self.code, min(samples), self.min_samples)

    def _shown(self, recording: Recording, entry: _FirstWeight) -> list[str]:
        """Return the signs, in words, that the first layer's input is too large; empty if there are none."""
        returned = _usual(recording, entry.outputs)
        contrast = _contrast(entry)
        shown = []
        if returned > self.output:
            shown.append(f"it returns {returned:.3g}")
        if contrast > self.gradient:
            shown.append(f"its relative gradient is {contrast:.2g} times the others'")
        return shown

    def _finding(
        self, recording: Recording, entry: _FirstWeight, scale: float, shown: list[str]
    ) -> Finding:
        site = entry.inputs[0]
        return Finding(
            code=self.code,
            severity=self.severity,
            site=site.site,
            step=int(recording.steps[0]),
            message="The input of the first layer of "
            f"{names_of(recording, [site.root])}, {site.site}, has an rms of "
            f"{scale:.3g}, but layers are initialised for about 1: "
            f"{', and '.join(shown)}.",
            evidence=InputScaleEvidence(
                input=plain(scale),
                output=plain(_usual(recording, entry.outputs)),
                gradient_to_others=plain(_contrast(entry)),
                samples=entry.samples,
            ),
            confidence=0.8,
            remedy="Scale the inputs once: subtract the mean and divide by the "
            "standard deviation of the training data, or divide pixels by 255.",
        )


@dataclass(frozen=True)
class _FirstWeight:
    """The first weight of a root, with the sites around it.

    Attributes:
        weights: The weights of the root, this one first.
        inputs: The floating-point inputs of its module.
        outputs: The outputs of its module.
        heads: The floating-point inputs of the root.
        samples: The number of measured steps in which the input was finite.
    """

    weights: WeightCourses
    inputs: list[SiteInfo]
    outputs: list[SiteInfo]
    heads: list[SiteInfo]
    samples: int


def _entries(recording: Recording) -> Iterator[_FirstWeight]:
    wiring = wire(recording)
    for root, own in weight_courses(recording).by_root(lambda _: True):
        first = own.weights[0]
        module = wiring.modules.get(first.param.owner)
        inputs = _floats(recording, module)
        if module is None or first.table or not inputs:
            continue
        samples = int(np.isfinite(rms(recording, inputs[:1])).sum())
        outputs = [recording.sites[site] for site in module.outs]
        heads = _floats(recording, wiring.modules.get(root_path(recording, root)))
        heads = [site for site in heads if site.root == root]
        yield _FirstWeight(own, inputs, outputs, heads, samples)


def _floats(recording: Recording, module: ModuleSites | None) -> list[SiteInfo]:
    sites = [recording.sites[site] for site in module.ins] if module is not None else []
    return [site for site in sites if "float" in site.dtype]


def _usual(recording: Recording, sites: list[SiteInfo]) -> float:
    """Return the median size of the largest of some values; NaN if none was measured."""
    return float(np.fmax.reduce(finite_medians(rms(recording, sites)), initial=np.nan))


def _first(recording: Recording, sites: list[SiteInfo]) -> float:
    """Return the size of the largest of some values when they were measured first; NaN if none was."""
    return float(np.fmax.reduce(first_finites(rms(recording, sites)), initial=np.nan))


def _contrast(entry: _FirstWeight) -> float:
    """Return the first weight's relative gradient in units of the others'; NaN if either is unknown."""
    own, *others = (finite_median(row) for row in entry.weights.gradient)
    known = [value for value in others if np.isfinite(value) and value > 0]
    if known:
        return own / float(np.median(known))
    return float("nan")
