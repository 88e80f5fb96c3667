"""SPIKE: sudden jumps of the loss and of the gradient, in any step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from kedge.rules.evidence import Evidence, said, unsaid
from kedge.rules.naming import NAMED, plain
from kedge.rules.recorded.course import Course
from kedge.rules.recorded.jump_start import JumpStart, jump_start
from kedge.rules.recorded.losses import losses, wavers, whole_steps
from kedge.rules.recorded.optimizers import later_starts
from kedge.rules.recorded.samples import too_few
from kedge.rules.recorded.trained import trained_roots
from kedge.rules.rule import Finding, Lack, Rule
from kedge.short_text import percent
from kedge.store.events import RowsEvent, RowShare, SmallBatchEvent
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Floats, Ints


@dataclass(frozen=True, kw_only=True)
class SpikeEvidence(Evidence):
    """The highest spike, the values around it, and the steps of all of them."""

    height: float | None = said("height {}")
    usual: float | None = said("usually {}")
    spikes: int = said("{} spikes")
    steps: Sequence[int] = said("steps {}")
    came_back: bool = said("it came back to the level before", no="it did not come back")
    course: Sequence[float | None] = unsaid()
    begins: JumpStart | None = unsaid(unless=None)
    of: int | None = unsaid(unless=None)
    rows: Sequence[RowShare] = unsaid(unless=())


@dataclass(frozen=True)
class Spike(Rule):
    """The loss or the norm of the gradients jumped far above its usual range.

    Meaning:
        In one or a few steps the loss lost a good part of its progress, or the gradient was many
        times larger than any before. Possible reasons: a bad batch, a learning rate at its limit, a
        precision that is too low. With Adam, one such gradient distorts the second moments for many
        steps.

    Formula:
        Loss L, with m the mean of the last recent losses. All three conditions must hold:

        1. The jump is large. Lightning's rule: L - m >= rtol * |m|. Or, for losses that never come
           near zero, all progress is lost: L - m > first - best, with L - m >= undone * |m|.
        2. No batch was like it: L - m > above * the greatest such jump in the last history losses.
        3. A good part of the progress is lost: L - m > undone * (first - best), where first is the
           median of the first recent losses, and best is the least mean of recent losses so far.

        Gradient norm G: G > factor * the greatest of the last history norms.

        Spikes less than recent steps apart count as one.

    Window:
        Every step, including those between samples, from the first with min_history steps before
        it. The loss is the value on which the program called backward. The norm is taken at the end
        of the backward pass, before the gradients are clipped; of several passes, at the end of the
        last one before the optimizer's step. Steps with fewer or more calls than usual are left
        out, such as the last step of a GAN, which lacks a part of its losses, and those of a batch
        of at most half of the usual samples, such as the last one of an epoch: one sample is much
        of its mean. The first step of a
        new optimizer, for example for a new head, starts a new training with a new history.

    Severity:
        - warning: usually.
        - info: a loss with a moving goal. That is one of several losses of as many models, each
          with an optimizer of its own, as in a GAN, where one falls when the other rises; or the
          loss of a model of which an untrained copy runs too, such as the target network of
          Q-learning, which is replaced from time to time. And any jump where a loss changes its
          sign in more than wavering of the steps, as that of a policy does: it weighs rewards
          against their mean, so that it is no measure and its gradients differ widely. And a jump
          of the gradient that comes back and that no loss follows, neither in that step nor in the
          recent ones after it, as with Adam, whose steps it hardly lengthens.

    Thresholds:
        - rtol (2), recent (10): those of Lightning's SpikeDetection.
        - above (5): 140 of 141 healthy runs reached at most 2.9; one with 8 images per batch once
          reached 7. Bad batches and steps 30 to 100 times too long reached 34 and more.
        - undone (0.25): a quarter of the progress; a loss near its end may triple without meaning.
          And a quarter of the loss, for jumps that Lightning's rule misses, such as a language
          model's from 3.1 to 5.1.
        - factor (10): Megatron-LM's, also relative to the largest of 100. Healthy runs reached 6.3;
          one bad batch or scaled loss reached 40 and more.
        - wavering (0.05): the loss of a policy changed its sign in 0.12 of the steps, losses that
          pass zero once or twice in 0.02 at most.
        - history (100), min_history (20): steps; 100 as in Megatron-LM, 20 for a meaningful spread.

    Evidence:
        The height, the usual value, the steps of all spikes, and whether the value had come back
        within ten steps of the last one. If the highest spike has a measured step: the first value
        in the order of the forward that is four times its median of up to 20 measured steps before,
        and twice the greatest of them; for the norm of the gradients, else the first gradient in
        the order of the backward that is ten times its own. On a CPU under Linux, for the first two
        jumps of a loss that is the mean or the sum of those of its rows: up to three rows of the
        batch with at least a fifth of it, of the lines that ran again with some rows alone; and the
        norm of their part of the gradient as a share of the whole's.

    Remedy:
        Look at the batch of that step, clip gradients (torch.nn.utils.clip_grad_norm_), lower the
        learning rate or warm it up; skip such batches, as Lightning's SpikeDetection and the
        training of PaLM did.

    Cannot see:
        Whether the batch, the rate or the precision made the jump, if no measured step fell on it;
        jumps within the first min_history steps, and rises that take longer than recent steps.
    """

    rtol: float = 2.0
    recent: int = 10
    above: float = 5.0
    undone: float = 0.25
    factor: float = 10.0
    history: int = 100
    min_history: int = 20
    wavering: float = 0.05

    code = "SPIKE"
    name = "the loss or the gradient jumped"
    severity = "warning"
    follows = (
        "NEVER-INITIALISED INPUT-SCALE INIT-SCALE DOUBLE-SOFTMAX LOSS-BELOW-ZERO "
        "GRADS-KEPT BATCH-OF-ONE RATE-TOO-LARGE GRAD-EXPLODE"
    )

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every loss, and one for the gradient of every root."""
        small = [event.step for event in recording.of(SmallBatchEvent) if _is_small(event)]
        known = [loss.where(~np.isin(loss.steps, small)) for loss in losses(recording)]
        excuse = ""
        if any(wavers(loss.values, self.min_history, self.wavering) for loss in known):
            excuse = _WAVERING
        for site in recording.of_kind("grad.norm"):
            norms = _norm(recording, site)
            norms = norms.where(~np.isin(norms.steps, small))
            starts = later_starts(recording, site.root)
            found = list(_in_each(norms, starts, self._jumps))
            is_unheard = self._is_unheard(norms.steps[found], known)
            what = f"The norm of the gradients ({site.site})"
            for finding in self._finding(recording, norms, found, what):
                why = excuse
                is_past = isinstance(finding.evidence, SpikeEvidence) and finding.evidence.came_back
                if not excuse and is_unheard and is_past:
                    why = _UNHEARD
                yield _excused(finding, why)
        if has_moving_goal(recording, len(known)):
            excuse = _MOVING
        for loss in known:
            jumps = _in_each(loss, later_starts(recording), self._losses)
            findings = self._finding(recording, loss, jumps, f"The loss ({loss.site.site})")
            yield from (_excused(finding, excuse) for finding in findings)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of steps with a loss or a norm for a past to compare with."""
        courses: list[Course] = [*losses(recording)]
        courses += [_norm(recording, site) for site in recording.of_kind("grad.norm")]
        known = [len(course) for course in courses]
        if not known:
            return None
        return too_few(self.code, max(known), self.min_history + 1, "steps with a loss")

    def _is_unheard(self, jumps: Ints, known: Sequence[Course]) -> bool:
        """Whether no loss rises where the gradient jumps, nor in the steps after that."""
        for loss in known:
            for at in np.searchsorted(loss.steps, jumps).tolist():
                before = loss.values[max(0, at - self.recent) : at]
                after = loss.values[at + 1 : at + 1 + self.recent]
                if len(before) < self.recent or len(after) < self.recent:
                    return False
                if max(loss.values[at], after.mean()) > before.max():
                    return False
        return bool(known)

    def _losses(self, values: Floats) -> Iterator[int]:
        if len(values) <= self.min_history:
            return
        means = np.convolve(values, np.full(self.recent, 1 / self.recent), "valid")
        first = float(np.median(values[: self.recent]))
        best = np.minimum.accumulate(means)
        jumps = np.concatenate([np.zeros(self.recent), values[self.recent :] - means[:-1]])
        for at in range(self.min_history, len(values)):
            mean = means[at - self.recent]
            jump = jumps[at]
            earlier = jumps[max(0, at - self.history) : at]
            progress = max(first - best[at - self.recent], 0.0)
            share = self.undone if jump > progress else self.rtol
            large = jump >= share * abs(mean) and jump > self.undone * progress
            if large and jump > self.above * earlier.max():
                yield at

    def _jumps(self, values: Floats) -> Iterator[int]:
        for at in range(self.min_history, len(values)):
            past = values[max(0, at - self.history) : at]
            if values[at] > self.factor * past.max() > 0:
                yield at

    def _finding(
        self, recording: Recording, course: Course, found: Iterable[int], what: str
    ) -> Iterator[Finding]:
        at = list(found)
        spikes = [
            place
            for before, place in pairwise([-self.recent, *at])
            if place - before >= self.recent
        ]
        if not spikes:
            return
        means = {}
        for place in spikes:
            before = course.values[max(0, place - self.recent) : place]
            means[place] = float(before.mean())
        highest = max(spikes, key=lambda at: course.values[at] / means[at])
        usual = means[highest]
        height = course.values[highest]
        step = int(course.steps[highest])
        after = course.values[spikes[-1] + 1 :][-self.recent :]
        passed = len(after) > 0 and bool(np.median(after) < (usual + height) / 2)
        fate = "came back" if passed else "did not come back"
        begins = self._start(recording, course, highest, (usual + height) / 2)
        rows = _rows_of(recording, course, step)
        where = ""
        look = "Look at the batch of that step"
        if begins is not None:
            where = f" {begins}"
            look = begins.remedy
        if rows is not None:
            where += _words_of_rows(rows)
        if rows is not None and rows.rows:
            look = f"Look at these rows of the batch of step {step}"
        often = ""
        if len(spikes) > 1:
            often = f", the highest of {len(spikes)} spikes"
        yield Finding(
            code=self.code,
            severity=self.severity,
            site=course.site.site,
            step=step,
            message=f"{what} jumped from {usual:.3g} to {height:.3g} at step "
            f"{step}{often}; it {fate}.{where}",
            evidence=SpikeEvidence(
                height=plain(height),
                usual=plain(usual),
                spikes=len(spikes),
                steps=course.steps[spikes[:NAMED]].tolist(),
                came_back=passed,
                course=[
                    plain(value)
                    for value in course.values[max(0, highest - NAMED) : highest + NAMED]
                ],
                begins=begins,
                of=None if rows is None else rows.of,
                rows=() if rows is None else rows.rows,
            ),
            confidence=0.8,
            remedy=f"{look}; clip gradients "
            "(torch.nn.utils.clip_grad_norm_), lower the learning rate or warm it up.",
        )

    def _start(
        self, recording: Recording, course: Course, at: int, high: float
    ) -> JumpStart | None:
        """Return where the first measured step of a spike begins to differ; None if it has none."""
        values = course.values[at : at + self.recent]
        ends = np.flatnonzero(values < high)
        steps = course.steps[at : at + int(min([*ends, len(values)]))]
        is_norm = course.site.kind == "grad.norm"
        roots = trained_roots(recording)
        if is_norm:
            roots = frozenset({course.site.root})
        return jump_start(recording, roots, steps, backward=is_norm)


def _is_small(event: SmallBatchEvent) -> bool:
    """Whether a batch has at most half of the usual samples, so that its mean scatters more."""
    return 0 < 2 * event.samples <= event.usual


def _rows_of(recording: Recording, course: Course, step: int) -> RowsEvent | None:
    """Return what the lines of a step have shown of the rows of its loss; None if they did not run again."""
    for event in recording.of(RowsEvent):
        if event.step == step and (
            course.site.kind == "grad.norm" or event.loss == course.site.site
        ):
            return event
    return None


def _words_of_rows(event: RowsEvent) -> str:
    """Return a sentence about the rows of a batch."""
    begin = " The lines of the step ran again in a copy of the process:"
    if not event.rows:
        return (
            f"{begin} no few of the {event.of} rows of the batch carry the loss, so it is not one "
            "of them that is bad."
        )
    parts = []
    for each in event.rows:
        row = f"row {each.row}"
        if each.sample is not None:
            row += f", sample {each.sample} of the data set,"
        words = f"{row} carries {percent(each.loss)} of the loss"
        if each.gradient is not None:
            words += f", and the norm of its gradient is {percent(each.gradient)} of the whole's"
        parts.append(words)
    return f"{begin} of the {event.of} rows of the batch, counted from 0, {'; '.join(parts)}."


def _excused(finding: Finding, excuse: str) -> Finding:
    """Return a finding as a hint, if there is an excuse for it."""
    if not excuse:
        return finding
    return replace(finding, severity="info", message=finding.message + excuse)


_WAVERING = (
    " The loss changes its sign again and again, as that of a policy does, so this may not be a "
    "fault."
)
_UNHEARD = " The loss went on as before, so it seems to have done no harm."
_MOVING = " Its goal moves as other models are trained, so this may not be a fault."


def has_moving_goal(recording: Recording, number: int) -> bool:
    """Whether a run's losses have a moving goal: models trained against each other, or an untrained copy of one.

    Args:
        recording: The recording.
        number: The number of its losses.
    """
    trained = [root for root in recording.roots if root.trained and root.parameters]
    copies = {
        (root.type, root.parameters)
        for root in recording.roots
        if root.trained is False and root.parameters
    }
    apart = any(
        not set(one.optimizers) & set(other.optimizers) for one, other in combinations(trained, 2)
    )
    against = apart and number > 1
    return against or any((root.type, root.parameters) in copies for root in trained)


def _norm(recording: Recording, site: SiteInfo) -> Course:
    """Return the norm of the gradients, in the steps that had all of them."""
    rows = recording.rows(site)
    values = np.sqrt(rows.sumsq)
    whole = whole_steps(rows.count)
    if len(recording.ranks) > 1:  # not every rank has a row in every step
        values = rows.statistic("rms") * math.sqrt(math.prod(site.shape))
        whole = np.ones(len(rows), dtype=bool)
    return Course(site, rows.step, values).where(rows.clean & np.isfinite(values) & whole)


def _in_each(
    course: Course, starts: Sequence[int], find: Callable[[Floats], Iterator[int]]
) -> Iterator[int]:
    """Yield the places that are found in each part of a course; the parts begin at some steps."""
    cuts = [0, *np.searchsorted(course.steps, starts).tolist(), len(course.steps)]
    for begin, end in pairwise(cuts):
        yield from (begin + at for at in find(course.values[begin:end]))
