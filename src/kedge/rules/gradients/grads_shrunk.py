"""GRADS-SHRUNK: gradients of which next to nothing is left when an optimizer uses them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kedge.rules.evidence import Evidence, said
from kedge.rules.naming import plain
from kedge.rules.recorded.optimizers import events_of, optimizers
from kedge.rules.recorded.roots import names_of
from kedge.rules.recorded.samples import no_end
from kedge.rules.recorded.weights import finite_medians, weight_courses
from kedge.rules.rule import Finding, Lack, Rule, Severity
from kedge.store.events import GradientsUsedEvent, RecordedOptimizer
from kedge.store.recording import Recording


@dataclass(frozen=True, kw_only=True)
class GradsShrunkEvidence(Evidence):
    """The norms of the gradients before and after, and the changes of the weights."""

    share: float | None = said("a share of {}")
    arrived: float | None = said("norm {} after backward")
    used: float | None = said("norm {} in the step")
    scale: float | None = said("scale {}")
    update: float | None = said("weights change by {} of their size")
    steps: int = said("{} measured steps")


@dataclass(frozen=True)
class GradsShrunk(Rule):
    """Between backward and the optimizer's step the gradients became next to nothing, and the weights hardly move.

    Meaning:
        The program clips or divides gradients so that nothing is left of them. Often it clips them
        while they are still multiplied by the scale of a GradScaler: what is left is then divided
        by the scale.

    Formula:
        s = the norm of an optimizer's gradients when it steps / their norm after the last backward
        pass, the latter divided by the scale of a GradScaler; u = the median over its weights of
        rms(update) / rms(weight). Reported if the median of s over the measured steps < share, and
        the median of u < moves. That gradients were clipped while scaled is inferred: their norm in
        the step, times the scale, is the same within a hundredth in all of these steps.

    Window:
        The measured steps, at least min_steps of them, and at most 64.

    Thresholds:
        - share (1e-3): clipping to the usual 1 leaves more, even of gradients of a norm of 100.
        - moves (1e-4): a tenth of the change that Karpathy calls healthy. Optimizers that divide by
          the size of the gradient, such as Adam, take no harm from small ones.
        - min_steps (10): measured steps.

    Severity:
        - error: nothing at all is left of them: they are cleared before the step.
        - warning: next to nothing is.

    Evidence:
        Both norms, the share, the scale, and the changes of the weights.

    Remedy:
        Call scaler.unscale_(optimizer) before clip_grad_norm_; clip to a norm near the usual one.
        Call zero_grad before backward, and not between backward and the step.

    Cannot see:
        Gradients that are changed during backward, by hooks of the program: they arrive
        changed. Clipping to next to nothing under Adam, which takes no harm from it.
    """

    share: float = 1e-3
    moves: float = 1e-4
    min_steps: int = 10

    code = "GRADS-SHRUNK"
    name = "next to nothing is left of the gradients when the optimizer steps"
    severity = "warning"
    of_training = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every optimizer."""
        known = {each.index: each for each in optimizers(recording) or ()}
        for event in events_of(recording, GradientsUsedEvent):
            optimizer = known.get(event.optimizer)
            if optimizer is None or event.steps < self.min_steps or event.share >= self.share:
                continue
            update = _usual_update(recording, optimizer)
            if update < self.moves:
                yield self._finding(recording, event, optimizer, update)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of an end of the program, when the norms are written."""
        return no_end(self.code, recording)

    def _finding(
        self,
        recording: Recording,
        event: GradientsUsedEvent,
        optimizer: RecordedOptimizer,
        update: float,
    ) -> Finding:
        names = names_of(recording, optimizer.roots)
        without = ""
        guess = ""
        remedy = (
            f"Clip to a norm near the usual {event.arrived:.2g}, or do not divide the gradients "
            "before the step."
        )
        if event.scale is not None:
            without = f" without the scale of {event.scale:,.0f}"
            if event.most <= (1 + _SAME) * event.least:
                guess = (
                    f" The norm in the step, times the scale, was {event.most:.3g} in each: "
                    f"probably they were clipped to {event.most:.3g} while still scaled."
                )
                remedy = "Call scaler.unscale_(optimizer) before clip_grad_norm_."
        severity: Severity = "warning"
        kind = ""
        left = (
            f"and of {event.used:.2g} when {optimizer.type} used them: {event.share:.1g} of it was "
            f"left, usually, in {event.steps} measured steps"
        )
        if event.used == 0:
            severity = "error"
            kind = "cleared"
            left = (
                f"and were zero or gone when {optimizer.type} stepped, usually, in {event.steps} "
                "measured steps: the program clears them in between"
            )
            remedy = "Call optimizer.zero_grad() before backward(), and not between backward() and step()."
        site = next(s for s in recording.of_kind("grad.norm") if s.root in optimizer.roots)
        return Finding(
            code=self.code,
            severity=severity,
            site=site.site,
            step=int(recording.steps[0]),
            message=f"The gradients of {names} had a norm of {event.arrived:.2g}{without} after "
            f"backward, {left}. Its steps change the weights by {update:.1g} of their size.{guess}",
            evidence=GradsShrunkEvidence(
                kind=kind,
                share=plain(event.share),
                arrived=plain(event.arrived),
                used=plain(event.used),
                scale=event.scale,
                update=plain(update),
                steps=event.steps,
            ),
            confidence=0.85,
            remedy=remedy,
        )


#: How far norms of clipped gradients may be apart, relative to their size.
_SAME = 0.01


def _usual_update(recording: Recording, optimizer: RecordedOptimizer) -> float:
    """Return the usual change of an optimizer's weights relative to their size; infinite if it is not known."""
    every = weight_courses(recording)
    own = [i for i, weight in enumerate(every.weights) if weight.root in optimizer.roots]
    usual = finite_medians(every.update[own])
    if not np.isfinite(usual).any():
        return float("inf")
    return float(np.nanmedian(usual))
