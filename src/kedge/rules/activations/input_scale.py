"""Inputs that are far too large or too small for the first layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kedge.rules.naming import plain
from kedge.rules.rule import Finding, Lack, Severity
from kedge.rules.samples import too_few
from kedge.rules.trained import names_of
from kedge.rules.weights import Weight, rms, share, weights
from kedge.rules.wiring import Module, wire
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Floats


@dataclass(frozen=True)
class InputScale:
    """The inputs are not scaled: their numbers are far from what layers are initialised for.

    What it says:
        Initialisations and learning rates are made for inputs of about unit variance. Pixels from 0 to 255, prices or times in
        seconds make the first layer's outputs and gradients as many times larger, so that one rate fits no layer. Of
        numbers that are as much too small, as of pixels that were divided by 255 twice too often, nothing reaches the outputs
        but the biases.

    Formula:
        x = the median over the measured steps of rms(input) of the first module with a weight, and of what the model was
        given. Reported if both > scale, and the input was so in the first measured step too (what only becomes large was
        made by a model that is trained), and that module shows it: the median rms of its output > output, or its gradient
        in relation to its size > gradient times the median of the other weights'. Or else, if both, and the input in the
        first step, are < small and not zero. Whole numbers are indices, and are left alone.

    Window:
        All measured steps, at least min_samples.

    Thresholds:
        - scale (50): images of handwritten digits from 0 to 255 have 79 to 85, photographs 120 to 150. Scaled inputs have 0.3
          to 2.
        - output (10): layers of healthy networks return 0.1 to 3 at their start.
        - gradient (10): the same factor, as the gradient of a weight is as large as its input.
        - small (1e-4): a thirtieth of sqrt(1e-5), which normalisations add to a standard deviation; beside it the input is
          nothing. Sparse features, as words or citations, have 0.003 to 0.01.
        - min_samples (3): enough for a median.

    Evidence:
        The scale of the input, of the output of the first module, and the relative gradients.

    Remedy:
        Scale the inputs: subtract the mean and divide by the standard deviation of the training data, or divide pixels by
        255.
    """

    scale: float = 50.0
    output: float = 10.0
    gradient: float = 10.0
    small: float = 1e-4
    min_samples: int = 3

    code: ClassVar[str] = "INPUT-SCALE"
    name: ClassVar[str] = "the inputs are not scaled"
    severity: ClassVar[Severity] = "warning"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give at most one finding for every root."""
        for entry in _entries(recording):
            sizes = [_median(recording, entry.inputs), _first(recording, entry.inputs)]
            sizes += [_median(recording, entry.heads)] if entry.heads else []
            if entry.samples < self.min_samples:
                continue
            if all(0 < size < self.small for size in sizes):
                yield self._finding(recording, entry, sizes[0], ["beside its biases that is nothing"])
            elif all(size > self.scale for size in sizes) and (shown := self._shown(recording, entry)):
                yield self._finding(recording, entry, sizes[0], shown)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return how many measured inputs are missing; without float inputs there is nothing to judge."""
        samples = [entry.samples for entry in _entries(recording) if entry.samples]
        return too_few(self.code, min(samples), self.min_samples) if samples else None

    def _shown(self, recording: Recording, entry: _Entry) -> list[str]:
        """Return in words how the first layer shows that its input is too large; nothing if it does not."""
        returned, contrast = _median(recording, entry.outputs), _contrast(recording, entry)
        shown = [f"it returns {returned:.3g}"] if returned > self.output else []
        return shown + (
            [f"its relative gradient is {contrast:.2g} times the others'"] if contrast > self.gradient else []
        )

    def _finding(self, recording: Recording, entry: _Entry, scale: float, shown: list[str]) -> Finding:
        site = entry.inputs[0]
        return Finding(
            code=self.code,
            severity=self.severity,
            site=site.site,
            step=int(recording.steps[0]),
            message=f"The input of the first layer of {names_of(recording, [site.root])}, {site.site}, has an rms of "
            f"{scale:.3g}, where layers are made for about 1; {', and '.join(shown)}.",
            evidence={
                "input": plain(scale),
                "output": plain(_median(recording, entry.outputs)),
                "gradient_to_others": plain(_contrast(recording, entry)),
                "samples": entry.samples,
            },
            confidence=0.8,
            remedy="Scale the inputs once: subtract the mean and divide by the standard deviation of the training data, or "
            "divide pixels by 255.",
        )


@dataclass(frozen=True)
class _Entry:
    """The first weight of a root, with the sites around it.

    Attributes:
        weight: The weight.
        others: The other weights of the root.
        inputs: What its module is given, as far as it is no indices.
        outputs: What its module returns.
        heads: What the root is given.
        samples: In how many measured steps the input was finite.
    """

    weight: Weight
    others: list[Weight]
    inputs: list[SiteInfo]
    outputs: list[SiteInfo]
    heads: list[SiteInfo]
    samples: int


def _entries(recording: Recording) -> Iterator[_Entry]:
    wiring, known = wire(recording), weights(recording)
    for root in sorted({w.param.root for w in known}):
        own = [w for w in known if w.param.root == root]
        first = own[0]
        module = wiring.modules.get(first.param.owner)
        prefix = recording.roots[root].prefix.rstrip(".") if root < len(recording.roots) else ""
        inputs = _floats(recording, module)
        if module is None or first.table or not inputs:
            continue
        samples = int(np.isfinite(rms(recording, inputs[:1])).sum())
        outputs = [recording.sites[site] for site in module.outs]
        heads = _floats(recording, wiring.modules.get(prefix))
        yield _Entry(first, own[1:], inputs, outputs, [s for s in heads if s.root == root], samples)


def _floats(recording: Recording, module: Module | None) -> list[SiteInfo]:
    sites = [recording.sites[site] for site in module.ins] if module is not None else []
    return [site for site in sites if "float" in site.dtype]


def _median(recording: Recording, sites: list[SiteInfo]) -> float:
    """Return the usual size of the largest of some values; NaN if none was measured."""
    table = rms(recording, sites)
    usual = [float(np.median(row[np.isfinite(row)])) for row in table if np.isfinite(row).any()]
    return max(usual, default=float("nan"))


def _first(recording: Recording, sites: list[SiteInfo]) -> float:
    """Return the size of the largest of some values where they were measured first; NaN if none was."""
    rows = [row[np.isfinite(row)] for row in rms(recording, sites)]
    return max((float(row[0]) for row in rows if len(row)), default=float("nan"))


def _contrast(recording: Recording, entry: _Entry) -> float:
    """Return the first weight's relative gradient in units of the others'; NaN if either is unknown."""
    own, *others = (_usual(recording, weight) for weight in (entry.weight, *entry.others))
    known = [value for value in others if np.isfinite(value) and value > 0]
    return own / float(np.median(known)) if known else float("nan")


def _usual(recording: Recording, weight: Weight) -> float:
    table: Floats = share(rms(recording, [weight.grad]), rms(recording, [weight.param]))
    return float(np.median(table[np.isfinite(table)])) if np.isfinite(table).any() else float("nan")
