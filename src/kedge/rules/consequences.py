"""Causes and effects among findings: the cause is a warning or an error, its effects become hints.

# Note [Consequences]
A learning rate that is too large kills units, stops gradients and makes the loss jump. A rule of
its own finds each of these, and the remedies of all but one would mislead. So a finding becomes
info if a cause of it was found as a warning or an error, in the same model or in one that the same
optimizer trains, and not clearly later. A finding that is info is not a cause: the first in the
table decides, and there are no circles. The cause gets the worst severity of its effects: an input
that stops all training is an error. A NaN ends the training, so it stays an error by itself.
NO-LEARNING is info in any case, but gets the remedy of its cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kedge.rules.recorded.roots import root_of
from kedge.rules.rule import SEVERITIES, Finding
from kedge.store.recording import Recording

#: A finding that begins more than this number of measured steps before another one does not follow
#: from it.
LAG = 3

#: What many faults lead to. It is always a hint, but its own remedy misleads where the fault is
#: known.
SYMPTOM = "NO-LEARNING"

#: Each cause with its effects, the deepest cause first. After a colon stands the ``kind`` in the
#: finding's evidence.
FOLLOWS: tuple[tuple[str, frozenset[str]], ...] = tuple(
    (cause, frozenset(effects.split()))
    for cause, effects in (
        # Equal weights get equal gradients; weights of zero get none, and pass none on.
        (
            "NEVER-INITIALISED",
            "INIT-SCALE DEAD-CHANNEL GRAD-ZERO GRAD-VANISH GRAD-EXPLODE SPIKE NO-LEARNING",
        ),
        # Inputs or weights that are too large or too small at the first step make outputs,
        # gradients and steps so.
        (
            "INPUT-SCALE",
            (
                "RATE-TOO-LARGE DEAD-CHANNEL GRAD-ZERO GRAD-VANISH GRAD-EXPLODE SATURATED SPIKE SCALE-DRIFT UPDATE-RATIO:large "
                "NO-LEARNING"
            ),
        ),
        (
            "INIT-SCALE",
            (
                "RATE-TOO-LARGE DEAD-CHANNEL GRAD-ZERO GRAD-VANISH GRAD-EXPLODE SATURATED SPIKE SCALE-DRIFT UPDATE-RATIO:large "
                "NO-LEARNING"
            ),
        ),
        # A loss without a lower bound moves the weights without end; logarithms of logits make one.
        (
            "DOUBLE-SOFTMAX",
            "LOSS-BELOW-ZERO RATE-TOO-LARGE GRAD-ZERO GRAD-EXPLODE SATURATED SPIKE SCALE-DRIFT UPDATE-RATIO:large",
        ),
        (
            "LOSS-BELOW-ZERO",
            "RATE-TOO-LARGE GRAD-ZERO GRAD-EXPLODE SATURATED SPIKE SCALE-DRIFT UPDATE-RATIO:large",
        ),
        # Gradients that add up make steps that are too long.
        (
            "GRADS-KEPT",
            "RATE-TOO-LARGE DEAD-CHANNEL GRAD-ZERO GRAD-EXPLODE SATURATED SPIKE SCALE-DRIFT UPDATE-RATIO:large NO-LEARNING",
        ),
        # One sample less its own mean is zero, whatever it was.
        ("BATCH-OF-ONE", "DEAD-CHANNEL GRAD-ZERO SPIKE NO-LEARNING"),
        # Steps that are too long overwrite the weights.
        (
            "RATE-TOO-LARGE",
            "DEAD-CHANNEL GRAD-ZERO GRAD-EXPLODE SATURATED SPIKE SCALE-DRIFT UPDATE-RATIO:large NO-LEARNING",
        ),
        # Parameters that are not trained stay in their first state.
        ("NOT-OPTIMIZED", "DEAD-CHANNEL UPDATE-RATIO:small NO-LEARNING"),
        ("UNUSED-PARAM", "UPDATE-RATIO:small"),
        # Numbers below the range of a narrow dtype become zero.
        ("UNDERFLOW", "GRAD-ZERO GRAD-VANISH UPDATE-RATIO:small NO-LEARNING"),
        # If all gradients were always zero, no weight has changed, and dead units were dead at the
        # start.
        ("GRAD-ZERO:all", "DEAD-CHANNEL UPDATE-RATIO:small"),
        # Units without a slope pass no gradient on.
        ("DEAD-CHANNEL", "GRAD-ZERO GRAD-VANISH UPDATE-RATIO:small NO-LEARNING"),
        ("SATURATED", "GRAD-ZERO GRAD-VANISH UPDATE-RATIO:small NO-LEARNING"),
        ("GRAD-ZERO", "UPDATE-RATIO:small NO-LEARNING"),
        # The first layers get nothing to learn from.
        ("GRAD-VANISH", "NO-LEARNING"),
        # The gradient that grew is also the one that jumps, and it makes the steps long.
        ("GRAD-EXPLODE", "SPIKE SCALE-DRIFT UPDATE-RATIO:large NO-LEARNING"),
    )
)


def follow(recording: Recording, findings: Iterable[Finding]) -> list[Finding]:
    """Return findings, with those that may follow from others as hints that name these; see Note [Consequences]."""
    found = list(findings)
    models = _Models(recording)
    for cause, effects in FOLLOWS:
        causes = [
            i for i, each in enumerate(found) if each.severity != "info" and cause in _kinds(each)
        ]
        for at, finding in enumerate(found):
            hinted = finding.severity == "info" and finding.code != SYMPTOM
            if hinted or "follows" in finding.evidence or not _kinds(finding) & effects:
                continue
            why = next((i for i in causes if models.may_follow(finding, found[i])), None)
            if why is not None:
                found[why] = replace(
                    found[why],
                    severity=min(found[why].severity, finding.severity, key=SEVERITIES.index),
                )
                found[at] = _lowered(finding, cause.partition(":")[0])
    return found


def _lowered(finding: Finding, cause: str) -> Finding:
    return replace(
        finding,
        severity="info",
        message=f"{finding.message} It may follow from {cause}.",
        evidence={**finding.evidence, "follows": cause},
        remedy=f"Fix {cause} first.",
    )


@dataclass(frozen=True)
class _Models:
    """The models that the findings of a recording belong to."""

    recording: Recording

    def may_follow(self, finding: Finding, cause: Finding) -> bool:
        """Whether a finding belongs to the same models as a cause, and is not clearly earlier."""
        here, there = self._concerned(finding.site), self._concerned(cause.site)
        if here is not None and there is not None and not here & there:
            return False
        since, begin = np.searchsorted(self.recording.steps, [finding.step, cause.step])
        return finding.step < 0 or cause.step < 0 or bool(since >= begin - LAG)

    @cached_property
    def _roots(self) -> dict[str, int]:
        return {site.site: site.root for site in self.recording.sites}

    def _concerned(self, site: str) -> frozenset[int] | None:
        """Return the roots that share an optimizer with that of a site; None if the site concerns the whole program.

        Sites of losses do, and those of models that no optimizer trains: the models that they serve
        are not known.
        """
        roots = self.recording.roots
        own = self._roots.get(site, root_of(self.recording, site.rpartition(":")[0]))
        if not 0 <= own < len(roots) or roots[own].trained is False:
            return None
        held = set(roots[own].optimizers)
        return frozenset(
            i for i, root in enumerate(roots) if i == own or held & set(root.optimizers)
        )


def _kinds(finding: Finding) -> frozenset[str]:
    """Return the names under which the table may have a finding: its code, and the code with its kind."""
    kind = finding.evidence.get("kind")
    return frozenset((finding.code, f"{finding.code}:{kind}") if kind else (finding.code,))
