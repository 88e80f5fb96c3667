"""Inputs that are far too large for the first layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kedge.rules.rule import Finding, Lack, Severity
from kedge.rules.samples import too_few
from kedge.rules.telling import plain
from kedge.rules.trained import names_of
from kedge.rules.weights import Weight, rms, share, weights
from kedge.rules.wiring import Module, wire
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Floats


@dataclass(frozen=True)
class InputScale:
    """The inputs are not scaled: their numbers are far larger than what layers are initialised for.

    What it says:
        Initialisations and learning rates are made for inputs of about unit variance. Pixels from 0 to 255, prices or times in
        seconds make the first layer's outputs and gradients as many times larger, so that one rate fits no layer.

    Formula:
        x = the median over the measured steps of rms(input) of the first module with a weight, and of what the model was
        given. Reported if both > scale, and that module shows it: the median rms of its output > output, or its gradient in
        relation to its size > gradient times the median of the other weights'. Whole numbers are indices, and are left alone.

    Window:
        All measured steps, at least min_samples.

    Thresholds:
        - scale (50): images of handwritten digits from 0 to 255 have 79 to 85, photographs 120 to 150. Scaled inputs have 0.3
          to 2.
        - output (10): layers of healthy networks return 0.1 to 3 at their start.
        - gradient (10): the same factor, as the gradient of a weight is as large as its input.
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
    min_samples: int = 3

    code: ClassVar[str] = "INPUT-SCALE"
    name: ClassVar[str] = "the inputs are not scaled"
    severity: ClassVar[Severity] = "warning"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give at most one finding for every root."""
        for entry in _entries(recording):
            scale, given = _median(recording, entry.inputs), _median(recording, entry.heads)
            if entry.samples < self.min_samples or not scale > self.scale or (entry.heads and not given > self.scale):
                continue
            returned, contrast = _median(recording, entry.outputs), _contrast(recording, entry)
            if returned > self.output or contrast > self.gradient:
                yield self._finding(recording, entry, scale, (returned, contrast))

    def lacking(self, recording: Recording) -> Lack | None:
        """Return how many measured inputs are missing; without float inputs there is nothing to judge."""
        samples = [entry.samples for entry in _entries(recording) if entry.samples]
        return too_few(self.code, min(samples), self.min_samples) if samples else None

    def _finding(self, recording: Recording, entry: _Entry, scale: float, effects: tuple[float, float]) -> Finding:
        site, (returned, contrast) = entry.inputs[0], effects
        shown = [f"it returns {returned:.3g}"] if returned > self.output else []
        shown += [f"its relative gradient is {contrast:.2g} times the others'"] if contrast > self.gradient else []
        return Finding(
            code=self.code,
            severity=self.severity,
            site=site.site,
            step=int(recording.steps[0]),
            message=f"The input of the first layer of {names_of(recording, [site.root])}, {site.site}, has an rms of "
            f"{scale:.3g}, where layers are made for about 1; {', and '.join(shown)}.",
            evidence={
                "input": plain(scale),
                "output": plain(returned),
                "gradient_to_others": plain(contrast),
                "samples": entry.samples,
            },
            confidence=0.8,
            remedy="Scale the inputs: subtract the mean and divide by the standard deviation of the training data, or divide "
            "pixels by 255.",
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


def _contrast(recording: Recording, entry: _Entry) -> float:
    """Return the first weight's relative gradient in units of the others'; NaN if either is unknown."""
    own, *others = (_usual(recording, weight) for weight in (entry.weight, *entry.others))
    known = [value for value in others if np.isfinite(value) and value > 0]
    return own / float(np.median(known)) if known else float("nan")


def _usual(recording: Recording, weight: Weight) -> float:
    table: Floats = share(rms(recording, [weight.grad]), rms(recording, [weight.param]))
    return float(np.median(table[np.isfinite(table)])) if np.isfinite(table).any() else float("nan")
