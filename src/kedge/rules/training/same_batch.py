"""SAME-BATCH: inputs that are the same in every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kedge.rules.evidence import Evidence, said
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.roots import names_of, root_path
from kedge.rules.rule import Finding, Rule, Severity
from kedge.store.events import RepeatedInputsEvent
from kedge.store.recording import Recording


@dataclass(frozen=True, kw_only=True)
class SameBatchEvidence(Evidence):
    """The steps whose inputs were compared, and what a data loader has."""

    compared: int = said("compared in {} measured steps")
    batch: int = said("{} samples each")
    batches: int | None = said("a data loader has {} batches of this size")


@dataclass(frozen=True)
class SameBatch(Rule):
    """The model gets the same inputs in every step.

    Meaning:
        The program draws its batch once, outside of the loop; or it begins the data loader anew in
        each step, as next(iter(loader)) does, and without shuffling gets its first batch for ever;
        or it sets the seed in each step. The model learns this batch by heart. A training on all
        data at once has the same inputs in every step on purpose, and so has a trial whether a
        model can fit one batch.

    Formula:
        All tensors that a trained model is given in its first pass of a step are equal to those of
        the first compared step, in at least min_compared measured steps, and in all that were
        compared. Of large inputs 1,024 elements are compared, the same ones each time.

    Severity:
        - warning: the program has a data loader with several batches of this size.
        - info: it has none, but their number is a power of two up to most_in_batch, as it is for
          most batches. Others are taken for all data of the program.

    Window:
        The first measured steps.

    Thresholds:
        - min_compared (10): measured steps after the first one.
        - most_in_batch (512): more samples are rarely one batch.

    Evidence:
        The number of steps, the size of the batch, and the number of batches in the data loader.

    Remedy:
        Make the iterator once and go on with it, or loop over the loader itself; draw the batch
        inside the loop, and set seeds before it.

    Cannot see:
        Inputs that come back every few steps; batches that are equal as sets but in another
        order; targets, which the model is not given.
    """

    min_compared: int = 10
    most_in_batch: int = 512

    code = "SAME-BATCH"
    name = "the inputs are the same in every step"
    severity = "warning"
    of_training = True
    leads_to = "NO-LEARNING"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        for event in events_of(recording, RepeatedInputsEvent):
            if event.compared < self.min_compared:
                continue
            sizes = [each.batches for each in event.loaders if each.batch_size == event.batch]
            batches = max(sizes, default=0)
            is_power_of_two = event.batch.bit_count() == 1
            if batches > 1:
                rest = f"a data loader of the program has {batches:,} batches of {event.batch:,}"
                yield self._finding(recording, event, rest, self.severity, batches)
            elif is_power_of_two and 4 <= event.batch <= self.most_in_batch:
                rest = f"they are {event.batch:,} samples, which may be one batch or all data"
                yield self._finding(recording, event, rest, "info", None)

    def _finding(
        self,
        recording: Recording,
        event: RepeatedInputsEvent,
        rest: str,
        severity: Severity,
        batches: int | None,
    ) -> Finding:
        return Finding(
            code=self.code,
            severity=severity,
            site=f"{root_path(recording, event.root)}:in",
            step=event.step,
            message=f"{names_of(recording, [event.root])} got the same inputs in step {event.step} "
            f"and in all {event.compared} measured steps that were compared with it; {rest}.",
            evidence=SameBatchEvidence(compared=event.compared, batch=event.batch, batches=batches),
            confidence=0.9,
            remedy="Draw the batch inside the loop, and go on with one iterator of the data "
            "loader: next(iter(loader)) begins anew each time. Nothing is wrong if these are all "
            "data, or if the model is to fit one batch as a trial.",
        )
