"""RIVAL-STOPPED: one of two models that train against each other gets hardly any gradient any more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.rules.evidence import Evidence, said
from kedge.rules.naming import plain
from kedge.rules.recorded.course import Course
from kedge.rules.recorded.losses import whole_steps
from kedge.rules.recorded.once import once
from kedge.rules.recorded.samples import too_few
from kedge.rules.rule import Finding, Lack, Rule
from kedge.store.recording import Recording
from kedge.store.rows import Floats


@dataclass(frozen=True, kw_only=True)
class RivalStoppedEvidence(Evidence):
    """The norms of the gradients of two models.

    Attributes:
        before: The largest usual norm of the one that stopped.
        after: Its usual norm at the end.
        other: The model that went on.
        other_before: The largest usual norm of that.
        other_after: Its usual norm at the end.
    """

    before: float | None = said("at most {}")
    after: float | None = said("at the end {}")
    other: str = said("the other: {}")
    other_before: float | None = said("its norm at most {}")
    other_after: float | None = said("its norm at the end {}")


@dataclass(frozen=True)
class RivalStopped(Rule):
    """The gradients of one of two adversaries fell a hundredfold, and those of the other went on.

    Meaning:
        In a GAN the generator learns from the gradients that pass through the discriminator, and the
        discriminator from what the generator makes. If one of them gets next to no gradient any
        more, it stays as it is, and the other one trains against something that does not move.
        Often the outputs of the generator are saturated, or the discriminator is so sure that its
        own output is.

    Formula:
        Two trained models, each with an optimizer of its own, of which one was given the output of
        the other one. Of the norm of each one's gradients: before = the largest median over window
        measured steps in a row, after = the median of the last quarter. Reported if after < fall *
        before for one of them, after >= steady * before for the other one, and the former is below
        fall times the latter at the end.

        Both models that stop at once are not reported, nor one that never got large gradients.
        Gradients that are exactly zero are GRAD-ZERO.

    Window:
        The measured steps with all gradients of a model, at least min_samples of each.

    Thresholds:
        - fall (1e-2): the usual norms of a healthy GAN of points stayed within a factor of three.
        - steady (0.1): of the other one.
        - window (10), min_samples (40): measured steps.

    Evidence:
        The norms of both, before and at the end.

    Remedy:
        Look at the output of the generator for saturated or dead units. Use a loss that does not
        saturate where the discriminator is sure (the negative logarithm of D in place of that of
        1 - D, or a Wasserstein loss with a gradient penalty), a lower learning rate for the other
        one, or fewer steps of it.

    Cannot see:
        Models of which none is given the output of the other unchanged; a collapse in which both
        go on getting gradients.
    """

    fall: float = 1e-2
    steady: float = 0.1
    window: int = 10
    min_samples: int = 40

    code = "RIVAL-STOPPED"
    name = "one of two adversaries gets no gradient any more"
    severity = "warning"
    of_training = True
    follows = "DEAD-CHANNEL SATURATED GRAD-ZERO"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every model that stopped."""
        for root, other in _rivals(recording):
            own, its = _norms(recording, root), _norms(recording, other)
            if own is None or its is None or min(len(own), len(its)) < self.min_samples:
                continue
            yield from self._compared(recording, (root, other), (own, its))

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured norms, where two models train against each other."""
        pairs = _rivals(recording)
        if not pairs:
            return None
        have = max(min(len(_norms(recording, root) or ()) for root in pair) for pair in pairs)
        return too_few(self.code, have, self.min_samples)

    def idle(self, recording: Recording) -> str:
        """Return that no two models train against each other."""
        if _rivals(recording):
            return ""
        return "no adversaries"

    def _compared(
        self, recording: Recording, roots: Sequence[int], norms: Sequence[Course]
    ) -> Iterator[Finding]:
        before, after = self._level(norms[0].values)
        other_before, other_after = self._level(norms[1].values)
        has_fallen = 0 < after < self.fall * before and after < self.fall * other_after
        if not has_fallen or other_after < self.steady * other_before:
            return
        name, other = (recording.roots[root].name for root in roots)
        course = norms[0]
        above = np.flatnonzero(course.values >= self.fall * before)
        step = int(course.steps[above[-1]])
        yield Finding(
            code=self.code,
            severity=self.severity,
            site=course.site.site,
            step=step,
            message=f"The gradients of {name} fell from a norm of {before:.2g} to {after:.2g}, and "
            f"were last above a hundredth of it in step {step:,}; those of {other}, which trains "
            f"with it, went on ({other_before:.2g}, and {other_after:.2g} at the end). {name} hardly "
            "learns any more.",
            evidence=RivalStoppedEvidence(
                before=plain(before),
                after=plain(after),
                other=other,
                other_before=plain(other_before),
                other_after=plain(other_after),
            ),
            confidence=0.8,
            remedy=f"Look at the outputs of {name} and {other} for saturated or dead units. Use a "
            "loss that does not saturate where one of them is sure, a lower learning rate for "
            f"{other}, or fewer steps of it.",
        )

    def _level(self, values: Floats) -> tuple[float, float]:
        """Return the largest usual value of a course, and the usual one at its end."""
        windows = np.lib.stride_tricks.sliding_window_view(values, self.window)
        last = values[-(len(values) // 4) :]
        return float(np.median(windows, axis=1).max()), float(np.median(last))


def _norms(recording: Recording, root: int) -> Course | None:
    """Return the norm of a root's gradients in the measured steps that had all of them."""
    for site in recording.of_kind("grad.norm"):
        if site.root == root:
            rows = recording.rows(site)
            values = np.sqrt(rows.sumsq)
            kept = whole_steps(rows.count) & rows.clean & np.isin(rows.step, recording.steps)
            return Course(site, rows.step, values).where(kept & np.isfinite(values))
    return None


@once
def _rivals(recording: Recording) -> tuple[tuple[int, int], ...]:
    """Return the pairs of roots with optimizers of their own of which one is given the output of the other; each twice."""
    roots = recording.roots
    makers = {site.id: site.root for site in recording.of_kind("out")}
    found = set()
    for site in recording.of_kind("in"):
        for source in site.sources:
            if source is None:
                continue
            maker = makers.get(source, -1)
            if not (0 <= maker < len(roots) and 0 <= site.root < len(roots)):
                continue
            its, own = set(roots[maker].optimizers), set(roots[site.root].optimizers)
            if its and own and not its & own:
                found |= {(maker, site.root), (site.root, maker)}
    return tuple(sorted(found))
