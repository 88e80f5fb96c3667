"""WORKERS-ALIKE: workers of a data loader that all give the same samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kedge.rules.evidence import Evidence, said
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.roots import names_of, root_path
from kedge.rules.rule import Finding, Rule
from kedge.store.events import RepeatedBatchesEvent
from kedge.store.recording import Recording


@dataclass(frozen=True, kw_only=True)
class WorkersAlikeEvidence(Evidence):
    """How often each batch came, and the workers of the data loader."""

    times: int = said("each {} times in a row")
    batches: int = said("{} batches")
    workers: int = said("{} workers")
    stream: bool | None = said("the data set is a stream", no="the data set has an index")


@dataclass(frozen=True)
class WorkersAlike(Rule):
    """Each batch comes as often as the data loader has workers.

    Meaning:
        Each worker has a copy of the data set. An IterableDataset that does not divide its samples
        is run through by each of them as a whole; a data set that draws its samples with a
        generator of its own draws the same ones in each. So an epoch has every batch several times,
        one after the other, and the model sees less data than it seems.

    Formula:
        The inputs of a trained model, in its first pass of each of the first 64 steps, come in
        groups of equal ones, all as long, and a data loader has as many workers. Of large inputs
        1,024 elements are compared. The first group and the last one do not count.

    Window:
        The first 64 steps.

    Thresholds:
        - min_batches (3): batches that came so often.

    Evidence:
        How often each batch came, the number of batches and of workers, and whether the data set is
        a stream.

    Remedy:
        In the __iter__ of an IterableDataset, give each worker its share (get_worker_info()). Make
        generators in the worker (worker_init_fn), with the seed of get_worker_info().

    Cannot see:
        Equal random numbers in data that differ otherwise, as in augmentations; batches that
        several passes share before the optimizer steps. Numbers of numpy.random and random differ
        between the workers: PyTorch seeds them.
    """

    min_batches: int = 3

    code = "WORKERS-ALIKE"
    name = "all workers of a data loader give the same samples"
    severity = "warning"
    of_training = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        for event in events_of(recording, RepeatedBatchesEvent):
            fitting = [each for each in event.loaders if each.workers == event.times]
            if event.batches >= self.min_batches and fitting:
                kinds = {each.stream for each in fitting}
                stream = kinds.pop()
                if kinds:
                    stream = None
                yield self._finding(recording, event, stream)

    def _finding(
        self, recording: Recording, event: RepeatedBatchesEvent, stream: bool | None
    ) -> Finding:
        shares = (
            "give each worker its share in the __iter__ of the IterableDataset, by "
            "torch.utils.data.get_worker_info(): each runs through the whole of it"
        )
        seeds = (
            "if the data set draws its samples with a generator of its own, make that in the "
            "worker (worker_init_fn), with the seed of torch.utils.data.get_worker_info()"
        )
        advice = {True: shares, False: seeds, None: f"of a stream, {shares}; {seeds}"}[stream]
        remedy = f"{advice[0].upper()}{advice[1:]}."
        return Finding(
            code=self.code,
            severity=self.severity,
            site=f"{root_path(recording, event.root)}:in",
            step=event.step,
            message=f"{names_of(recording, [event.root])} got each of its batches {event.times} times "
            f"in a row, from step {event.step} on (all {event.batches} that were compared), and as many "
            "workers of a data loader give them: probably all of them have the same samples.",
            evidence=WorkersAlikeEvidence(
                times=event.times, batches=event.batches, workers=event.times, stream=stream
            ),
            confidence=0.9,
            remedy=remedy,
        )
