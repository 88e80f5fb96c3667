"""Batch statistics of a single sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kedge.rules.ledger import listed
from kedge.rules.optimizers import Entry, events_of
from kedge.rules.rule import Finding, Lack, Severity
from kedge.rules.telling import NAMED
from kedge.rules.trained import tells_training, trains
from kedge.store.recording import Recording


@dataclass(frozen=True)
class BatchOfOne:
    """Batch normalisation in training was given a single sample.

    What it says:
        The mean and the variance of one sample say nothing of the data: the layer takes out what tells this sample from
        others, and its running statistics, which evaluation uses, take the noise in.

    Formula:
        A module with batch statistics, in training mode and in a step with gradients, was given a batch whose first
        dimension is 1.

    Window:
        The measured steps.

    Thresholds:
        - named (3): how many modules the message names.

    Severity:
        - warning: it happened, or happened again and again.
        - info: it is known that it happened once.

    Evidence:
        The modules, their types, the first step, and how often, where it was counted.

    Remedy:
        DataLoader(..., drop_last=True) if it is what is left of an epoch; else a larger batch, or GroupNorm or
        LayerNorm, which need no batch.
    """

    named: int = 3

    code: ClassVar[str] = "BATCH-OF-ONE"
    name: ClassVar[str] = "batch statistics of a single sample"
    severity: ClassVar[Severity] = "warning"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give one finding for all modules."""
        latest = {str(event["path"]): event for event in events_of(recording, "batch") if event.get("samples") == 1}
        if latest:
            yield self._finding(recording, list(latest.values()))

    def lacking(self, recording: Recording) -> Lack | None:
        """Return that batches were not looked at; a model without batch statistics has none to judge."""
        concerned = any("BatchNorm" in site.type for site in recording.sites) and trains(recording)
        return (
            Lack(self.code, "record of the batches", 0, 1, grows=False)
            if concerned and not tells_training(recording)
            else None
        )

    def _finding(self, recording: Recording, events: list[Entry]) -> Finding:
        paths = [str(event["path"]) for event in events]
        first = min(int(event["step"]) for event in events)
        times = [int(event["times"]) for event in events if event.get("times") is not None]
        often = f" in {max(times):,} measured steps" if times and max(times) > 1 else ""
        texts = {site.site for site in recording.sites}
        site = next((f"{path}:{kind}" for path in paths for kind in ("in", "out") if f"{path}:{kind}" in texts), None)
        return Finding(
            code=self.code,
            severity="info" if times and max(times) == 1 else "warning",
            site=site or f"{paths[0]}:in",
            step=first,
            message=f"{listed(paths, self.named)} ({events[0].get('type', 'batch normalisation')}) took the statistics of a "
            f"batch of one sample in training{often}, first at step {first}.",
            evidence={
                "modules": paths[:NAMED],
                "of": len(paths),
                "types": sorted({str(event.get("type", "")) for event in events}),
                "times": max(times) if times else None,
            },
            confidence=0.9,
            remedy="If it is what is left of an epoch, DataLoader(..., drop_last=True); else take a larger batch, or GroupNorm "
            "or LayerNorm, which need no batch.",
        )
