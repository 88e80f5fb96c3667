"""WEIGHTS-SHRUNK: weights that become next to nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kedge.rules.evidence import Evidence, said, unsaid
from kedge.rules.naming import plain
from kedge.rules.parameters.update_ratio import FROM_ZERO
from kedge.rules.recorded.roots import names_of
from kedge.rules.recorded.samples import too_few
from kedge.rules.recorded.weights import WeightCourses, first_finites, weight_courses, weights
from kedge.rules.rule import Finding, Lack, Rule
from kedge.short_text import listed
from kedge.store.recording import Recording
from kedge.store.rows import Floats


@dataclass(frozen=True)
class ShrunkWeight:
    """The size of a weight, root mean square, when it was first and when it was last measured."""

    first: float | None
    last: float | None


@dataclass(frozen=True, kw_only=True)
class WeightsShrunkEvidence(Evidence):
    """The weights that became next to nothing."""

    weights: Mapping[str, ShrunkWeight] = unsaid()
    concerned: int = said("{} of this kind")
    of: int = said("of {} in all")


_BEGAN = 0.9
"""The share of its first size below which a weight has begun to shrink."""


@dataclass(frozen=True)
class WeightsShrunk(Rule):
    """Most weights become next to nothing.

    Meaning:
        Something draws all weights to zero more strongly than the loss holds them: weight decay or
        a penalty on the parameters that is far too large, or a program that scales or clamps them.
        What the model returns then hardly depends on its input.

    Formula:
        The size of a weight (root mean square) is at its last measured step at most left times that
        at its first. Reported if this holds for at least part of the weights of a model that change
        by training, and that did not begin at zero, if the model ever got a gradient: without one
        even a usual decay draws them to zero, and GRAD-ZERO says what is wrong.

    Window:
        From the first measured step to the last.

    Thresholds:
        - left (0.02): healthy weights keep most of their size; under strong decay, where a norm
          follows that makes their size irrelevant, they keep a tenth.
        - part (0.5): of the weights, so that a layer which is switched off is not reported.
        - least (2): weights; a single one may be a number that is sought, and not a network's.
        - min_steps (3): measured steps.

    Evidence:
        The weights with their first and last sizes.

    Remedy:
        Make weight_decay, or the factor of the penalty, smaller by ten, and again if necessary:
        0.01 of AdamW and 1e-4 of SGD are usual.

    Cannot see:
        Which of the two draws them; single layers that shrink; what vanished before the recording
        began.
    """

    left: float = 0.02
    part: float = 0.5
    least: int = 2
    min_steps: int = 3

    code = "WEIGHTS-SHRUNK"
    name = "most weights become next to nothing"
    severity = "warning"
    of_training = True
    follows = "LOSS-BELOW-ZERO"
    leads_to = "GRAD-VANISH GRAD-ZERO UNDERFLOW DEAD-CHANNEL SCALE-DRIFT UPDATE-RATIO NO-LEARNING"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        for root, group in weight_courses(recording).by_root(lambda weight: not weight.table):
            first = first_finites(group.size)
            last = first_finites(group.size[:, ::-1])
            changes = np.nan_to_num(group.update).max(axis=1, initial=0) > 0
            judged = np.flatnonzero(changes & (first > FROM_ZERO) & np.isfinite(last))
            is_pulled = (group.gradient > 0).any()
            if len(group.steps) < self.min_steps or len(judged) < self.least or not is_pulled:
                continue
            shrunk = judged[last[judged] <= self.left * first[judged]]
            if len(shrunk) >= self.part * len(judged):
                yield self._finding(recording, root, group, shrunk, len(judged), first, last)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured steps; without weights that change there is nothing to judge."""
        if not any(weight.update is not None for weight in weights(recording)):
            return None
        return too_few(self.code, len(recording.steps), self.min_steps, "measured steps")

    def _finding(
        self,
        recording: Recording,
        root: int,
        group: WeightCourses,
        shrunk: np.ndarray,
        of: int,
        first: Floats,
        last: Floats,
    ) -> Finding:
        order = sorted(shrunk.tolist(), key=lambda row: last[row] / first[row])
        worst = order[0]
        whole = group.size[worst] >= 0.5 * first[worst]
        half = int(group.steps[np.flatnonzero(whole)[-1]])
        began = group.size[worst] < _BEGAN * first[worst]
        step = int(group.steps[np.flatnonzero(began)[0]])
        names = [group.weights[row].param.name for row in order]
        model = names_of(recording, [root])
        return Finding(
            code=self.code,
            severity=self.severity,
            site=group.weights[worst].param.site,
            step=step,
            message=f"{len(shrunk)} of {of} weights of {model} became next to nothing, "
            f"{listed(names, 3)}: {names[0]} went from {first[worst]:.3g} to {last[worst]:.3g} "
            f"(rms). It had half its size left at step {half}.",
            evidence=WeightsShrunkEvidence(
                weights={
                    group.weights[row].param.path: ShrunkWeight(plain(first[row]), plain(last[row]))
                    for row in order[:6]
                },
                concerned=len(shrunk),
                of=of,
            ),
            confidence=0.9,
            remedy="Make weight_decay, or the factor of a penalty on the parameters, smaller by "
            "ten, and again if necessary: 0.01 of AdamW and 1e-4 of SGD are usual. If the program "
            "scales or clamps its parameters, look there.",
        )
