"""BATCH-OF-ONE: batch statistics of a single sample."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.rules.evidence import Evidence, said
from kedge.rules.naming import NAMED
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.samples import measured, too_few
from kedge.rules.recorded.trained import trained_sites, trains
from kedge.rules.rule import Finding, Lack, Rule, Severity
from kedge.short_text import listed
from kedge.store.events import ModesEvent
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL, Ints


@dataclass(frozen=True, kw_only=True)
class BatchOfOneEvidence(Evidence):
    """The modules that normalised over one sample, and in how many measured steps at most."""

    modules: Sequence[str] = said("modules {}")
    of: int = said("of {} in all")
    types: Sequence[str] = said("of type {}")
    times: int = said("{} times")


@dataclass(frozen=True)
class BatchOfOne(Rule):
    """Batch normalisation got a batch of one sample in training.

    Meaning:
        The mean and the variance of one sample say nothing about the data: the layer removes the
        differences between this sample and others, and its running statistics, which evaluation
        uses, become noisy.

    Formula:
        The output of a BatchNorm of a trained model has as many elements as one sample had in the
        first measured step. If the batch was larger then, an output with only samples and channels
        must show the same, because images may have several sizes. Modules in evaluation mode are
        left out, and so is SyncBatchNorm, whose batch is that of all processes.

    Window:
        The measured steps.

    Thresholds:
        - named (3): the most modules that the message names.

    Severity:
        - warning: it happened repeatedly.
        - info: it happened in one measured step, for example at the end of an epoch.

    Evidence:
        The modules, their types, and the number of measured steps.

    Remedy:
        If it is the rest of an epoch, use DataLoader(..., drop_last=True); otherwise a larger
        batch, or GroupNorm or LayerNorm, which do not depend on the batch.

    Cannot see:
        Small batches of two or three, whose statistics are nearly as poor; a batch of one whose
        images have several positions, unless the batch was larger in the first measured step.
    """

    named: int = 3

    code = "BATCH-OF-ONE"
    name = "batch statistics of a single sample"
    severity = "warning"
    of_training = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield one finding for all modules."""
        found = [
            (site, steps)
            for site in _normalised(recording)
            if len(steps := _alone(recording, site))
        ]
        if found:
            yield self._finding(found)

    def idle(self, recording: Recording) -> str:
        """Return that no module has batch statistics."""
        if not _normalised(recording):
            return "no batch statistics"
        return ""

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured steps; a model without batch statistics has none to judge."""
        sites = _normalised(recording) if trains(recording) else []
        if not sites:
            return None
        return too_few(self.code, measured(recording, sites), 1)

    def _finding(self, found: list[tuple[SiteInfo, Ints]]) -> Finding:
        paths = [site.name for site, _ in found]
        times = max(len(steps) for _, steps in found)
        first = min(int(steps[0]) for _, steps in found)
        severity: Severity = "info"
        often = f" in step {first}"
        if times > 1:
            severity = "warning"
            often = f" in {times:,} measured steps, first at step {first}"
        return Finding(
            code=self.code,
            severity=severity,
            site=found[0][0].site,
            step=first,
            message=f"{listed(paths, self.named)} ({found[0][0].type}) normalised "
            f"over a batch of one sample in training{often}.",
            evidence=BatchOfOneEvidence(
                modules=paths[:NAMED],
                of=len(paths),
                types=sorted({site.type for site, _ in found}),
                times=times,
            ),
            confidence=0.9,
            remedy="If it is the rest of an epoch, use DataLoader(..., "
            "drop_last=True); otherwise a larger batch, or GroupNorm or LayerNorm, "
            "which do not depend on the batch.",
        )


def _normalised(recording: Recording) -> list[SiteInfo]:
    """Return the outputs of the modules with batch statistics that are trained in training mode."""
    latest = {event.root: event for event in events_of(recording, ModesEvent)}
    frozen = {path for event in latest.values() for path in event.eval}
    sites = (
        site
        for site in trained_sites(recording, "out")
        if site.type.startswith("BatchNorm") and len(site.shape) > 1
    )
    return [site for site in sites if site.path not in frozen]


def _alone(recording: Recording, site: SiteInfo) -> Ints:
    """Return the steps in which each value of a site had the size of one sample."""
    rows = recording.rows(site)
    alone = rows.count == rows.calls * math.prod(site.shape[1:])
    steps: Ints = rows.step[alone & (rows.level == FULL)]
    if len(site.shape) == 2 or site.shape[0] == 1:
        return steps
    # Images of another size have another number of elements too: a value of samples and channels
    # alone shows the batch.
    for other in trained_sites(recording, "out"):
        if other.root != site.root or len(other.shape) != 2:
            continue
        known = recording.rows(other)
        if other.shape[0] == site.shape[0]:
            is_alone = known.count == known.calls * other.shape[1]
            return np.intersect1d(steps, known.step[is_alone])
    return steps[:0]
