"""Gradients that are exactly zero."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kedge.rules.losses import steps_without_loss
from kedge.rules.naming import NAMED
from kedge.rules.rule import Finding, Lack, Severity
from kedge.rules.samples import measured, too_few
from kedge.rules.trained import trained_sites
from kedge.rules.wiring import wire
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL, Ints, Rows


@dataclass(frozen=True)
class GradZero:
    """A gradient that arrives, and is exactly zero step after step.

    What it says:
        A parameter took part in backward and got nothing but zeros: whatever the optimizer does, it does not learn.
        Something on the way has no slope: rounding, a comparison, argmax, a clamp beyond its bounds, dead
        or saturated units, a product with zero, or a dtype too narrow for what is left.

    Formula:
        A gradient is zero in a step if the sum of its squares is 0 and so are its extremes, where they were measured.
        Reported if it was zero in each of the last samples sampled steps that had it; few are enough where no gradient
        of the model was ever anything else.

    Window:
        The last samples sampled steps in which the parameter got a gradient and that was finite. Of a model that ever got
        another gradient, steps in which every loss is exactly zero are left out: a hinge or a triplet loss that every
        sample has passed has nothing more to teach. A bias is left out where the weight of its module gets a gradient: the
        gradient arrives there, and the loss is of differences, to which a bias adds nothing. A parameter that got none at
        all is for UNUSED-PARAM.

    Thresholds:
        - samples (20): a factor that starts at zero, as in LoRA or ReZero, hides its branch for one step, and
          an expert of a mixture may go without a token for a few.
        - few (5): where all gradients are zero, neither hides behind the other.

    Severity:
        - error: no gradient of the root was ever anything but zero; the model stands still.
        - warning: some of them are, or all of them have become it, though the loss is not zero.

    Evidence:
        Whether no gradient of the root was ever anything else, the parameters without a gradient, how many the root has,
        since which step, and the first module towards the loss
        whose parameters got one: what cuts the gradient lies before that, or in it.

    Remedy:
        Look between the module that is named and the one before it for an operation without a slope: round, sign,
        argmax, a comparison, clamp, a product with zero, dead units (DEAD-CHANNEL), saturated ones (SATURATED).
    """

    samples: int = 20
    few: int = 5

    code: ClassVar[str] = "GRAD-ZERO"
    name: ClassVar[str] = "a gradient is exactly zero"
    severity: ClassVar[Severity] = "error"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give at most one finding for every root."""
        grads = trained_sites(recording, "param.grad")
        for root in sorted({site.root for site in grads}):
            own = [site for site in grads if site.root == root]
            judged = _courses(recording, own)
            if any(course.moved for course in judged.values()):
                judged = _courses(recording, own, steps_without_loss(recording))
            enough = self.samples if any(course.moved for course in judged.values()) else self.few
            still = {site for site, course in judged.items() if course.length >= enough}
            driven = {site for site, course in judged.items() if course.moved} - still
            still -= {site for site in still if _is_shift(site, driven)}
            if still:
                yield self._finding(recording, judged, still, enough)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return how many measured gradients are missing; without gradients there is nothing to judge."""
        grads = [site for site in trained_sites(recording, "param.grad") if len(recording.rows(site))]
        return too_few(self.code, measured(recording, grads), self.samples) if grads else None

    def _finding(
        self, recording: Recording, judged: dict[SiteInfo, _Course], zero: set[SiteInfo], enough: int
    ) -> Finding:
        modules = wire(recording).modules
        order = sorted(judged, key=lambda site: modules[site.owner].position)
        still = [site for site in order if site in zero]
        last = still[-1]
        later = [site for site in order[order.index(last) + 1 :] if modules[site.owner] is not modules[last.owner]]
        next_one = later[0] if later else None
        names = ", ".join(site.path for site in still[-NAMED:])
        step = max(judged[site].since for site in still)
        never = len(still) == len(judged) and not any(course.moved for course in judged.values())
        return Finding(
            code=self.code,
            severity="error" if never else "warning",
            site=last.site,
            step=step,
            message=f"{_gradients(len(still))} exactly zero in each of the last {enough} sampled steps or more, since "
            f"step {step}: {names}{_rest(len(still))}.{_nearer(next_one)}",
            evidence={
                "kind": "all" if never else "some",
                "parameters": [site.path for site in still],
                "of": len(judged),
                "next_with_gradient": next_one.path if next_one else None,
            },
            confidence=0.95,
            remedy=_REMEDY,
        )


_REMEDY = (
    "Look from there towards the loss for an operation without a slope: round, sign, argmax, a comparison, clamp beyond "
    "its bounds, a product with zero, dead units (DEAD-CHANNEL), saturated ones (SATURATED), or float16 without a loss "
    "scale (UNDERFLOW)."
)


def _is_shift(site: SiteInfo, driven: Iterable[SiteInfo]) -> bool:
    """Whether a site is of a bias beside another parameter of its module that gets a gradient."""
    return site.path.rpartition(".")[2] == "bias" and any(other.owner == site.owner for other in driven)


def _courses(recording: Recording, sites: Iterable[SiteInfo], without: Ints | None = None) -> dict[SiteInfo, _Course]:
    return {site: _Course.of(recording.rows(site), without) for site in sites}


@dataclass(frozen=True)
class _Course:
    """For how many samples a gradient has been zero, since which step, and whether it ever was anything else."""

    length: int
    since: int
    moved: bool

    @classmethod
    def of(cls, rows: Rows, without: Ints | None = None) -> _Course:
        """Read the sampled steps in which the gradient was there and finite, but for some."""
        known = (rows.level == FULL) & rows.clean & (rows.count > 0)
        if without is not None:
            known &= ~np.isin(rows.step, without)
        extremes = np.maximum(np.abs(np.nan_to_num(rows.min)), np.abs(np.nan_to_num(rows.max)))
        zero = ((rows.sumsq == 0) & (extremes == 0))[known]
        moved = np.flatnonzero(~zero)
        start = int(moved[-1]) + 1 if len(moved) else 0
        length = len(zero) - start
        return cls(length, int(rows.step[known][start]) if length else -1, len(moved) > 0)


def _gradients(number: int) -> str:
    return "The gradient of one parameter was" if number == 1 else f"The gradients of {number} parameters were"


def _rest(number: int) -> str:
    return f" and {number - NAMED} before them" if number > NAMED else ""


def _nearer(site: SiteInfo | None) -> str:
    return f" {site.path}, nearer to the loss, gets one." if site else ""
