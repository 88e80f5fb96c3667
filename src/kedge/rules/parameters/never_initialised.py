"""NEVER-INITIALISED: weights that were not initialised, or that start equal and stay so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from kedge.rules.evidence import Evidence, said, unsaid
from kedge.rules.naming import NAMED, plain
from kedge.rules.recorded.once import once
from kedge.rules.recorded.roots import by_root, names_of
from kedge.rules.recorded.weights import Weight, weights
from kedge.rules.rule import Finding, Lack, Rule
from kedge.short_text import listed
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL


@dataclass(frozen=True)
class StartRange:
    """The values of a weight in the first step."""

    min: float | None
    max: float | None
    rms: float | None


@dataclass(frozen=True, kw_only=True)
class NeverInitialisedEvidence(Evidence):
    """The first of the weights, and how many they are."""

    weights: Mapping[str, StartRange] = unsaid()
    concerned: int = said("{} of this kind")


@dataclass(frozen=True)
class NeverInitialised(Rule):
    """Weights start as leftover memory, or all equal, so that the units of a layer never become different.

    Meaning:
        torch.empty, a checkpoint without one of the keys, or a custom layer without a reset leave a
        weight with the previous content of its memory. Constant weights give all units the same
        output and the same gradient, so a layer of many units works like a single one.

    Formula:
        In the first step, before any update: a weight contains non-finite values or values beyond
        huge, or its rms is below tiny but not zero. Or: in_a_row or more consecutive weights are
        constant. Zeros count only if their gradients are zero too, or if all weights of the model
        are zero. A single constant weight among others is deliberate, such as the zeros of LoRA, of
        a residual branch or of an output layer.

    Window:
        Step 0, if it was measured. Weights are parameters with at least two dimensions of more than
        one element; a constant embedding or normalisation is not reported.

    Thresholds:
        - huge (10000): initial values are below 10.
        - tiny (1e-20): leftover memory often contains subnormal numbers. Initial values are above
          1e-6.
        - in_a_row (2): consecutive constant weights.

    Evidence:
        The weights with their smallest value, largest value and rms.

    Remedy:
        Initialise them (torch.nn.init, or the layer's reset_parameters()), call load_state_dict
        with strict=True, and use torch.zeros or torch.randn instead of torch.empty.

    Cannot see:
        Leftover memory that holds usual numbers; wrong but usual initial values, of which
        INIT-SCALE sees some; weights of a run that was not watched from its first step.
    """

    huge: float = 1e4
    tiny: float = 1e-20
    in_a_row: int = 2

    code = "NEVER-INITIALISED"
    name = "weights start as leftover memory, or all equal"
    severity = "error"
    of_training = True
    of_the_beginning = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding of each kind for every root."""
        for root, own in by_root(_starts(recording), lambda start: start.site.root):
            odd = [start for start in own if self._is_odd(start)]
            if odd:
                yield self._finding(recording, root, odd, _ODD)
            alike = self._alike([start for start in own if not start.excepted])
            if alike:
                yield self._finding(recording, root, alike, _ALIKE)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of a measured step 0; without weights there is nothing to judge."""
        known = [weight for weight in weights(recording) if _is_matrix(weight.param)]
        starts = _starts(recording)
        if known and not starts:
            # An optimizer may call the model in its own first step, before the model is known.
            grows = 0 not in recording.steps
            return Lack(self.code, "measured first step of weights", 0, 1, grows=grows)
        if starts and not any(start.bounded or start.nonfinite for start in starts):
            return Lack(self.code, "smallest and largest values of weights", 0, 1, grows=False)
        return None

    def _is_odd(self, start: _Start) -> bool:
        return start.nonfinite or start.largest > self.huge or 0 < start.rms < self.tiny

    def _alike(self, own: list[_Start]) -> list[_Start]:
        """Return the first run of constant weights that training cannot make different."""
        for alike, group in groupby(own, key=lambda start: start.low == start.high):
            run = list(group)
            if alike and len(run) >= self.in_a_row and self._stays(run, own):
                return run
        return []

    def _stays(self, run: list[_Start], own: list[_Start]) -> bool:
        if any(start.low != 0 for start in run):
            return sum(start.low != 0 for start in run) >= self.in_a_row
        return len(run) == len(own) or all(start.zero_gradient for start in run)

    def _finding(self, recording: Recording, root: int, found: list[_Start], says: str) -> Finding:
        names = [start.site.name for start in found]
        first = found[0]
        verb, it = ("start", "they") if len(names) > 1 else ("starts", "it")
        said = says.format(start=verb, it=it, values=first.values())
        return Finding(
            code=self.code,
            severity=self.severity,
            site=first.site.site,
            step=0,
            message=f"{listed(names, NAMED)} of {names_of(recording, [root])} {said}.",
            evidence=NeverInitialisedEvidence(
                weights={start.site.path: start.range() for start in found[:NAMED]},
                concerned=len(found),
            ),
            confidence=0.9,
            remedy="Initialise the weights (torch.nn.init, or reset_parameters() of "
            "the layer); check the keys that load_state_dict did not find, and use "
            "torch.randn or torch.zeros instead of torch.empty.",
        )


_ODD = (
    "{start} with values that no initialisation makes ({values}), before any step of the optimizer"
)
_ALIKE = (
    "{start} constant, one after the other ({values}): all units of a layer return "
    "the same and get the same gradient, so {it} cannot become different"
)


@once
def _starts(recording: Recording) -> list[_Start]:
    return [
        start
        for weight in weights(recording)
        if (start := _Start.of(recording, weight)) is not None
    ]


@dataclass(frozen=True)
class _Start:
    """The values of one weight in step 0, before any update."""

    site: SiteInfo
    low: float
    high: float
    rms: float
    bounded: bool
    "Whether its extremes were measured; otherwise its rms stands for them, which distinguishes zeros from other constants."
    nonfinite: bool
    zero_gradient: bool
    "Whether its gradient in that step was zero."
    excepted: bool
    "Whether it may be constant: an embedding, or a normalisation."

    @classmethod
    def of(cls, recording: Recording, weight: Weight) -> _Start | None:
        """Return the start of a weight; None if step 0 was not measured, or if only one dimension has several elements."""
        every, site = recording.all_rows, weight.param
        rows = every.rows
        at = int(every.starts[site.id])
        if (
            not every.lengths[site.id]
            or rows.step[at] != 0
            or rows.level[at] != FULL
            or not _is_matrix(site)
        ):
            return None
        rms = float(recording.statistic("rms")[at])
        bounded = bool(np.isfinite(rows.min[at]))
        low, high = -rms, rms
        if bounded:
            low = float(rows.min[at])
            high = float(rows.max[at])
        zero_gradient = False
        if weight.grad is not None and every.lengths[weight.grad.id]:
            there = int(every.starts[weight.grad.id])
            zero_gradient = bool(rows.step[there] == 0 and rows.sumsq[there] == 0)
        return cls(
            site=site,
            low=low,
            high=high,
            rms=rms,
            bounded=bounded,
            nonfinite=not bool(rows.clean[at]),
            zero_gradient=zero_gradient,
            excepted=weight.table or "Norm" in site.type,
        )

    @property
    def largest(self) -> float:
        """The largest magnitude; 0 where it was not measured."""
        return float(np.nanmax(np.abs([self.low, self.high, 0.0])))

    def range(self) -> StartRange:
        """Return the figures for a finding."""
        return StartRange(min=plain(self.low), max=plain(self.high), rms=plain(self.rms))

    def values(self) -> str:
        """Return a description of the values."""
        if self.nonfinite:
            return f"{self.site.name} is not finite"
        if self.low == self.high:
            return f"{self.site.name} is {self.low:.3g} everywhere"
        return f"{self.site.name} from {self.low:.3g} to {self.high:.3g}, rms {self.rms:.3g}"


def _is_matrix(site: SiteInfo) -> bool:
    """Whether more than one dimension of a weight has more than one element."""
    return sum(size > 1 for size in site.shape) > 1
