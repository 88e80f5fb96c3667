"""NO-LEARNING: losses that end where they began."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kedge.rules.evidence import Evidence, said
from kedge.rules.naming import plain
from kedge.rules.recorded.losses import Loss, ascending, fall, losses, noise_of
from kedge.rules.recorded.optimizers import events_of, trained_by
from kedge.rules.recorded.roots import root_path
from kedge.rules.recorded.samples import too_few
from kedge.rules.recorded.trained import trained_roots, trains
from kedge.rules.recorded.weights import weight_courses
from kedge.rules.rule import Finding, Lack, Rule
from kedge.short_text import percent
from kedge.store.events import FrozenEvent, LossGraphEvent, RepeatedInputsEvent
from kedge.store.recording import Recording
from kedge.store.rows import Floats


@dataclass(frozen=True, kw_only=True)
class NoLearningEvidence(Evidence):
    """The first and the last values of the loss, its noise from step to step, and what may be the cause.

    Attributes:
        reach: The sum of the relative changes of all steps, of the usual weight, if it is small.
        frozen: The frozen share of the model, if it is most of it.
        same_inputs: In how many compared steps the inputs were the same, if they were in all.
    """

    first: float | None = said("at first {}")
    last: float | None = said("at last {}")
    noise: float | None = said("noise {}")
    losses: int = said("{} losses")
    classes: int | None = said("{} classes")
    reach: float | None = said("all steps change the weights by {} at most", unless=None)
    frozen: float | None = said("frozen: {} of the model", unless=None)
    same_inputs: int | None = said("the same inputs in {} steps", unless=None)


@dataclass(frozen=True)
class NoLearning(Rule):
    """The loss at the end is not below that at the start by more than its noise, or is no better than chance.

    Meaning:
        The loss does not show that the model learned anything. Possible reasons: labels that do not
        belong to their inputs, a loss with the wrong sign, a learning rate that is far too small or
        too large, a part of the model that is not trained.

    Formula:
        s = the noise of the loss, from the differences between neighbours (median absolute
        deviation). The loss has fallen if the median of its last quarter is below the median of the
        first head values, below the first value, or below the median of the first quarter by more
        than sure standard errors of their difference. Reported if it has not fallen by any of these
        comparisons, or if it is above the first value and the first head values by as much: then it
        came down only from where it had risen to.

        Or, for cross-entropy over the C outputs of a model: if the last quarter is not below chance
        times log(C). This is known only if the loss is the mean of log-probabilities from a softmax
        over the last dimension.

        A loss that crosses zero is not judged, as in reinforcement learning; nor are several losses
        if one has fallen, as in a GAN, nor one whose backward begins with a negative number.

        What the recording shows of possible causes is said: if the updates of the usual weight,
        relative to its size, add up to less than reach over the whole run, the learning rate is too
        small; if most elements are frozen; if the inputs were the same in all compared steps.
        Gradients that shrink before the step, updates far too small and the like are findings of
        their own, from which this one follows.

    Window:
        All steps with a loss, at least min_losses, the first of them within the first ten.

    Thresholds:
        - min_losses (50): fewer show little but noise.
        - head (5): values at the beginning, because most of the fall often happens in a few steps.
        - sure (3): standard errors.
        - chance (0.98): of the logarithm of the number of classes, which is the loss of a constant
          answer.
        - reach (1e-2): weights that move by a hundredth of their size in the whole run hardly
          change what a model computes; healthy steps move them by a thousandth each.
        - same (10): compared steps with the same inputs.

    Evidence:
        The medians at the beginning and at the end, the noise, the loss of chance, if known, and
        what may be the cause.

    Remedy:
        That of the cause that was seen. Without one: check that labels belong to their inputs and
        still do after shuffling, try to fit a single batch, and try ten times the learning rate and
        a tenth of it.

    Cannot see:
        Labels that do not belong to their inputs; a loss that falls because the network learns them
        by heart; a network that learns less than it could.
    """

    min_losses: int = 50
    head: int = 5
    sure: float = 3.0
    chance: float = 0.98
    reach: float = 0.01
    same: int = 10

    code = "NO-LEARNING"
    name = "the loss ends where it began"
    severity = "info"
    of_training = True
    of_the_beginning = True
    is_symptom = True
    follows = (
        "NEVER-INITIALISED INPUT-SCALE INIT-SCALE GRADS-KEPT BATCH-OF-ONE "
        "RATE-TOO-LARGE NOT-OPTIMIZED GRADS-SHRUNK UNDERFLOW DEAD-CHANNEL SATURATED GRAD-ZERO "
        "GRAD-VANISH GRAD-EXPLODE UPDATE-RATIO:small"
    )

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding: for the loss with most values."""
        known = [] if not trains(recording) else self._judged(recording)
        if not known or any(
            self._fallen(loss.values) and not self._at_chance(recording, loss) for loss in known
        ):
            return
        worst = max(known, key=lambda loss: len(loss.values))
        if worst.ends_badly or (worst.values.min() < 0 < worst.values.max()):
            return
        yield self._finding(recording, worst)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of losses; without training there is nothing to judge."""
        if not trains(recording):
            return None
        have = max((len(loss.values) for loss in losses(recording)), default=0)
        if not have:
            return Lack(self.code, "loss", 0, 1, grows=False)
        return too_few(self.code, have, self.min_losses, "steps with a loss")

    def _judged(self, recording: Recording) -> list[Loss]:
        large = ascending(recording)
        return [
            x
            for x in losses(recording)
            if len(x.values) >= self.min_losses
            and x.steps[0] <= _START
            and x.site.site not in large
        ]

    def _fallen(self, values: Floats) -> bool:
        """Whether a loss fell by more than its noise, by any of three comparisons."""
        noise = noise_of(values)
        last = values[-(len(values) // 4) :]
        of_head, of_first, of_quarter = (
            fall(before, last, noise)
            for before in (values[: self.head], values[:1], values[: len(values) // 4])
        )
        if of_head < -self.sure and of_first < -self.sure:
            return False  # it came down from where it had risen to
        return max(of_head, of_first, of_quarter) > self.sure

    def _at_chance(self, recording: Recording, loss: Loss) -> bool:
        classes = _classes(recording, loss)
        return classes is not None and bool(
            np.median(_last(loss)) >= self.chance * math.log(classes)
        )

    def _finding(self, recording: Recording, loss: Loss) -> Finding:
        first = float(np.median(loss.values[: self.head]))
        last = float(np.median(_last(loss)))
        noise = noise_of(loss.values)
        classes = _classes(recording, loss)
        chance = ""
        if classes is not None and self._at_chance(recording, loss):
            level = math.log(classes)
            is_worse = last > _WORSE * level
            verb = "is"
            if is_worse:
                verb = "is above"
            chance = f", which {verb} chance for {classes} classes (log {classes} = {level:.3g})"
        step = int(loss.steps[-1])
        end = recording.end
        run = 0
        if end is not None:
            run = end.steps or 0
        ended = f"ended at {last:.4g}"
        if run - 1 - step > run // _CUT_SHORT:
            ended = (
                f"was {last:.4g} by step {step:,}, the last of {run:,} steps in which it "
                "was recorded"
            )
        causes = self._causes(recording)
        seen = ""
        remedy = _UNKNOWN
        if causes:
            seen = f" What may be the cause: {'; '.join(cause.says for cause in causes)}."
            remedy = "; ".join(cause.remedy for cause in causes)
            remedy = f"{remedy[:1].upper()}{remedy[1:]}. {_ELSE}"
        shown: dict[str, Any] = {cause.field: cause.value for cause in causes}
        return Finding(
            code=self.code,
            severity=self.severity,
            site=loss.site.site,
            step=step,
            message=f"The loss ({loss.site.site}) began at {first:.4g} and "
            f"{ended}{chance}, with a noise of {noise:.2g} from step to step: it does "
            f"not show that anything was learned.{seen}",
            evidence=NoLearningEvidence(
                first=plain(first),
                last=plain(last),
                noise=plain(noise),
                losses=len(loss.values),
                classes=classes,
                **shown,
            ),
            confidence=0.7,
            remedy=remedy,
        )

    def _causes(self, recording: Recording) -> list[_Cause]:
        """Return what the recording shows of possible causes."""
        found = []
        reach = _reach(recording)
        if reach < self.reach:
            says = (
                f"the changes of the usual weight add up to {percent(reach)} of its size over all "
                "steps"
            )
            remedy = f"raise the learning rate{_rates(recording)}"
            found.append(_Cause("reach", plain(reach), says, remedy))
        frozen = _frozen_share(recording)
        if frozen > _MOST:
            says = f"{percent(frozen)} of the model is frozen"
            found.append(_Cause("frozen", plain(frozen), says, "see whether it is to be frozen"))
        same = _same_inputs(recording)
        if same >= self.same:
            says = f"the inputs were the same in all {same} measured steps that were compared"
            found.append(_Cause("same_inputs", same, says, "draw the batch inside the loop"))
        return found


class _Cause(NamedTuple):
    """What may be a cause.

    Attributes:
        field: The field of the evidence that has its figure.
        value: The figure.
        says: What was seen.
        remedy: What to do, as a part of a sentence.
    """

    field: str
    value: float | None
    says: str
    remedy: str


_UNKNOWN = (
    "Check that labels belong to their inputs and survive shuffling, try to fit a single batch, "
    "and vary the learning rate by ten in both directions."
)

_ELSE = (
    "If this is not it, check that labels belong to their inputs and survive shuffling, and try to "
    "fit a single batch."
)

#: The least share of a model that counts as most of it.
_MOST = 0.5

#: A record that lacks more than this part of the run at its end does not show how the run ended.
_CUT_SHORT = 10

#: From how many times the loss of chance on it is said to be above that.
_WORSE = 1.1

#: The last step in which a first value belongs to the beginning.
_START = 10


def _last(loss: Loss) -> Floats:
    return loss.values[-(len(loss.values) // 4) :]


def _classes(recording: Recording, loss: Loss) -> int | None:
    """Return the number of classes if a loss is cross-entropy of the output of the only trained model; else None."""
    trained = trained_roots(recording)
    roots = [root for root in range(len(recording.roots)) if root in trained]
    if not str(loss.site.node).startswith("NllLoss") or len(roots) != 1:
        return None
    if not _is_over_classes(recording, loss):
        return None
    head = root_path(recording, roots[0])
    shapes = [site.shape for site in recording.of_kind("out") if site.path == head]
    classes = 0
    if len(shapes) == 1 and len(shapes[0]) == 2:
        classes = shapes[0][-1]
    if classes > 1:
        return classes
    return None


def _is_over_classes(recording: Recording, loss: Loss) -> bool:
    """Whether the graph of a loss has a softmax, and over the classes as far as it shows their dimension."""
    graphs = [
        event for event in events_of(recording, LossGraphEvent) if event.site == loss.site.site
    ]
    if not graphs:
        return True
    softmax = any("LogSoftmax" in node for node in graphs[0].nodes[1:3])
    reads = [read for read in graphs[0].softmaxes if read.by == "nll_loss"]
    return softmax and all(read.dim in read.classes for read in reads)


def _reach(recording: Recording) -> float:
    """Return the sum over all steps of the usual weight's relative change; infinite if it is not known.

    Between measured steps the change is taken to be between theirs.
    """
    courses = weight_courses(recording)
    reached = []
    for row in courses.update:
        known = np.isfinite(row)
        if known.sum() < _FEWEST:
            continue
        changes = row[known]
        between = (changes[1:] + changes[:-1]) / 2 * np.diff(courses.steps[known])
        reached.append(float(changes[0] + between.sum()))
    if not reached:
        return math.inf
    return float(np.median(reached))


#: The fewest measured steps of which the changes add up to something.
_FEWEST = 20


def _rates(recording: Recording) -> str:
    """Return the learning rates of all trained models in brackets; empty if they are not known."""
    by = [trained_by(recording, root) for root in sorted(trained_roots(recording))]
    shown = ", ".join(dict.fromkeys(each for each in by if each))
    if not shown:
        return ""
    return f" ({shown})"


def _frozen_share(recording: Recording) -> float:
    """Return the largest frozen share of a trained model, as far as it is most of it; else 0."""
    events = events_of(recording, FrozenEvent)
    return max((e.frozen / e.elements for e in events if e.elements), default=0.0)


def _same_inputs(recording: Recording) -> int:
    """Return in how many compared steps the inputs were the same; 0 if they differed, or this is not known."""
    return max((e.compared for e in events_of(recording, RepeatedInputsEvent)), default=0)
