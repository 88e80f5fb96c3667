"""RATE-TOO-LARGE: learning rates that overwrite the weights in the first steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.rules.evidence import Evidence, said, unsaid
from kedge.rules.naming import plain
from kedge.rules.parameters.update_ratio import FROM_ZERO
from kedge.rules.recorded.course import Course
from kedge.rules.recorded.losses import Loss, losses, wavers
from kedge.rules.recorded.optimizers import rates_of, updater_of
from kedge.rules.recorded.roots import names_of
from kedge.rules.recorded.samples import too_few
from kedge.rules.recorded.weights import Weight, WeightCourses, share, weight_courses, weights
from kedge.rules.rule import Finding, Lack, Rule
from kedge.short_text import listed
from kedge.store.recording import Recording
from kedge.store.rows import Bools, Floats, Ints


@dataclass(frozen=True)
class GrownWeight:
    """The sizes of a weight, and the largest of its updates relative to them."""

    first: float | None
    largest: float | None
    update_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class RateTooLargeEvidence(Evidence):
    """The weights that were overwritten most, and the first values of the loss."""

    weights: Mapping[str, GrownWeight] = unsaid()
    concerned: int = said("{} of this kind")
    of: int = said("of {} in all")
    losses: Sequence[float | None] = said("{} losses")
    rates: Sequence[float] = said("rates: {}")


@dataclass(frozen=True)
class RateTooLarge(Rule):
    """The first steps overwrite the weights: they change by more than their own size, and the loss does not fall.

    Meaning:
        The initialisation is lost after a few steps. A schedule that lowers the rate later hides
        this: the run continues from weights that are many times too large.

    Formula:
        u(t) = rms(update) / rms(weight) before step t, and g(t) = rms(weight) / its first rms, as
        far as the updates up to t explain it: the program may have written to the weight. A weight
        is overwritten if, within the first soon steps, u >= whole from the second step on, u(0) >=
        grown, or g >= 1 + grown. Reported if this holds for at least two weights and for at least
        part of all weights (or for the only weight), and the loss of the following steps is not
        below the first loss, or is not finite, or the gradients of some of these weights are exactly
        zero in all later measured steps, at least soon of them. A loss that changes its sign in more than a twentieth
        of the steps, as that of a policy, is no measure: then at least half of all weights count.

        Or: the loss reaches jump times the first loss in two of the first soon steps, and u > harm
        in as many weights before that.

    Window:
        The first soon steps, as far as they were measured. Weights that start at zero are left out,
        because any later size is large relative to zero.

    Thresholds:
        - whole (1): the size of the weight itself. 1e-3 is usual, according to Karpathy.
        - grown (2): a weight of three times its first size. Healthy runs reach 1.5 times within ten
          steps.
        - soon (10): steps. UPDATE-RATIO, SPIKE and GRAD-EXPLODE judge the later ones.
        - part (0.25): of the weights. A single head that starts small on purpose grows by more.
        - unmeasured (0.5): of the weights, where no loss is a measure.
        - jump (3): times the first loss, together with harm (0.1), as in UPDATE-RATIO.
        - min_steps (3): measured steps among the first soon.

    Evidence:
        The weights with their sizes before and after and their largest update, the losses, and the
        optimizer's learning rates.

    Remedy:
        Divide the learning rate by ten, repeatedly if necessary; raise it slowly over the first
        steps (warm-up); clip gradients.

    Cannot see:
        A rate that is too large later in the run (UPDATE-RATIO, SPIKE and GRAD-EXPLODE look
        there), or for parameters with fewer than two dimensions; a rate with which the loss
        still falls.
    """

    whole: float = 1.0
    grown: float = 2.0
    soon: int = 10
    part: float = 0.25
    unmeasured: float = 0.5
    jump: float = 3.0
    harm: float = 0.1
    min_steps: int = 3

    code = "RATE-TOO-LARGE"
    name = "the first steps overwrite the weights"
    severity = "error"
    of_training = True
    of_the_beginning = True
    follows = "INPUT-SCALE INIT-SCALE DOUBLE-SOFTMAX LOSS-BELOW-ZERO GRADS-KEPT"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        known = [loss for loss in losses(recording) if not wavers(loss.values)]
        beginnings = [early for loss in known if (early := _Beginning.of_loss(loss, self.soon))]
        if known and not beginnings:
            return
        soon = np.flatnonzero(recording.steps <= self.soon)
        if len(soon) < 2 or recording.steps[0] > 1:
            return
        for root, group in weight_courses(recording).by_root(_is_updated):
            from_nonzero = np.flatnonzero(group.size[:, 0] > FROM_ZERO)
            own = group.part(from_nonzero, soon)
            if not own.weights:
                continue
            later = group.gradient[from_nonzero][:, recording.steps > self.soon]
            stopped = (np.isfinite(later).sum(axis=1) >= self.soon) & ~(later > 0).any(axis=1)
            found = self._overwritten(own, beginnings, stopped)
            if found is not None:
                yield self._finding(recording, root, own, *found)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured first steps; without updates of weights there is nothing to judge."""
        if not any(_is_updated(weight) for weight in weights(recording)):
            return None
        have = int((recording.steps <= self.soon).sum())
        return too_few(
            self.code, have, self.min_steps, f"measured steps among the first {self.soon}"
        )

    def _overwritten(
        self, own: WeightCourses, beginnings: list[_Beginning], stopped: Bools
    ) -> tuple[list[int], int, _Beginning | None, list[int]] | None:
        """Return the weights that were overwritten, the step by which they were, a loss, and those without a gradient since."""
        number = len(own.weights)
        part = self.part
        if not beginnings:
            part = self.unmeasured
        needed = max(min(2, number), int(np.ceil(part * number)))
        bar = np.where(own.steps == 0, self.grown, self.whole)
        large = (own.update >= bar) | (_growth(own) >= 1 + self.grown)
        first = _reached(large, own.steps, needed)
        dead = np.flatnonzero(large.any(axis=1) & stopped).tolist()
        if first is not None and (dead or all(early.stays(first) for early in beginnings)):
            found = np.flatnonzero(large.any(axis=1)).tolist()
            return found, first, next(iter(beginnings), None), dead
        risen = [at for early in beginnings if (at := early.risen(self.jump)) is not None]
        if beginnings and len(risen) == len(beginnings):
            harmed = (own.update > self.harm) & (own.steps < min(risen))
            if harmed.any(axis=1).sum() >= needed:
                found = np.flatnonzero(harmed.any(axis=1)).tolist()
                return found, min(risen), beginnings[0], []
        return None

    def _finding(
        self,
        recording: Recording,
        root: int,
        own: WeightCourses,
        found: list[int],
        step: int,
        loss: _Beginning | None,
        dead: list[int],
    ) -> Finding:
        updates = np.nanmax(own.update, axis=1, initial=0)
        strongest = np.fmax(updates, np.nanmax(_growth(own) - 1, axis=1, initial=0))
        order = sorted(found, key=lambda i: -strongest[i])
        names = [own.weights[i].param.name for i in order]
        worst = order[0]
        weight = own.weights[worst]
        model = names_of(recording, [root])
        by = updater_of(recording, root, step)
        fell = ""
        confidence = 0.6
        values: list[float | None] = []
        if loss is not None:
            confidence = 0.9
            values = [plain(value) for value in loss.values]
            highest = loss.height(step)
            fell = f", and the loss went from {loss.first:.3g} to {highest:.3g}"
        if dead:
            gone = listed([own.weights[i].param.name for i in dead], 3)
            fell += f"; the gradient of {gone} has been exactly zero since"
        figures = {}
        for i in order[:6]:
            sizes = own.size[i][np.isfinite(own.size[i])]
            figures[own.weights[i].param.path] = GrownWeight(
                first=plain(sizes[0]),
                largest=plain(sizes.max()),
                update_ratio=plain(updates[i]),
            )
        return Finding(
            code=self.code,
            severity=self.severity,
            site=(weight.update or weight.param).site,
            step=step,
            message=f"By step {step} {by} had overwritten {len(found)} "
            f"of {len(own.weights)} weights of {model}, {listed(names, 3)}: a step "
            f"changed {names[0]} by {updates[worst]:.2g} times its size{fell}.",
            evidence=RateTooLargeEvidence(
                weights=figures,
                concerned=len(found),
                of=len(own.weights),
                losses=values,
                rates=rates_of(recording, root),
            ),
            confidence=confidence,
            remedy="Divide the learning rate by ten, and again if necessary; raise "
            "it slowly over the first steps (warm-up), and clip gradients.",
        )


class _Beginning(Course):
    """The first values of a loss; non-finite ones count as infinite."""

    @classmethod
    def of_loss(cls, loss: Loss, soon: int) -> _Beginning | None:
        """Return the first values of a loss; None if its beginning was not recorded."""
        values = loss.rows.statistic("mean")
        values = np.where(np.isfinite(values), values, np.inf)
        early = cls(loss.site, loss.rows.step, values).where(loss.rows.step <= 2 * soon)
        usable = len(early) > 1 and early.steps[0] <= 1 and np.isfinite(early.first)
        if not usable:
            return None
        return early

    @property
    def first(self) -> float:
        """The first value."""
        return float(self.values[0])

    def stays(self, step: int) -> bool:
        """Whether the values from a step on are not below the first."""
        after = self.values[self.steps >= step]
        return len(after) > 0 and bool(np.median(after) >= self.first)

    def risen(self, jump: float) -> int | None:
        """Return the step of the second value that is a multiple of the first; None if there is none."""
        high = np.flatnonzero((self.values >= jump * self.first) & (self.values > 0))
        if len(high) > 1 and self.first > 0:
            return int(self.steps[high[1]])
        return None

    def height(self, step: int) -> float:
        """Return the highest value from a step to a few steps later."""
        near = self.values[(self.steps >= step) & (self.steps <= step + 3)]
        if len(near):
            return float(near.max())
        return float(self.values[-1])


def _growth(own: WeightCourses) -> Floats:
    """Return the sizes of weights in units of their first, as far as the optimizer's updates explain them.

    The program may have written to the weights itself: reset them for the next fold, or loaded them.
    """
    first = own.size[:, :1]
    steps = np.diff(own.steps, append=own.steps[-1] + 1)
    made = np.cumsum(own.update * own.size * steps, axis=1)
    explained = _SAMPLED * (first + np.hstack([np.zeros_like(first), made[:, :-1]]))
    unexplained = own.size > explained  # never where an update is not known
    return share(np.where(unexplained, explained, own.size), first)


#: By how many times an update may be larger than that of the elements which are compared.
_SAMPLED = 1.5


def _reached(large: np.ndarray, steps: Ints, needed: int) -> int | None:
    """Return the step by which enough weights had been overwritten at some time; None if that did not happen."""
    so_far = np.logical_or.accumulate(large, axis=1).sum(axis=0)
    enough = np.flatnonzero(so_far >= needed)
    if not len(enough):
        return None
    return int(steps[enough[0]]) + 1


def _is_updated(weight: Weight) -> bool:
    """Whether the changes of a weight are recorded."""
    return weight.update is not None
