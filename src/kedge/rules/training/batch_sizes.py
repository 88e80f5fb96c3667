"""BATCH-SIZES: an input of one sample beside inputs of a whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kedge.rules.evidence import Evidence, said
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.roots import names_of, root_path
from kedge.rules.rule import Finding, Rule
from kedge.short_text import listed
from kedge.store.events import BatchSizesEvent
from kedge.store.recording import Recording


@dataclass(frozen=True, kw_only=True)
class BatchSizesEvidence(Evidence):
    """The input of one sample, and those beside it."""

    input: str = said("input {} has one sample")
    batch: int = said("the others have {}")
    others: Sequence[str] = said("inputs {}")


@dataclass(frozen=True)
class BatchSizes(Rule):
    """The model gets one sample of one input, and a batch of all others.

    Meaning:
        Where values are broadcast, every sample of the batch is computed with the same one of this
        input, and nothing fails. A tokenizer or a collate function that returns the first sample
        alone does this. What serves all samples on purpose, such as a prompt that is drawn anew in
        each step, looks the same, so this is only said.

    Formula:
        The first size of one input of a trained model is 1, and that of all its other inputs is one
        and the same larger number. The input has at least two dimensions, none of the others' size,
        and other values in a later step: masks and positions stay the same, a single number such as
        a time step serves all, and the state of a recurrent layer has its batch in the second place.

    Window:
        The first measured steps.

    Thresholds:
        - min_batch (2): samples of the other inputs.

    Evidence:
        The inputs, by their names or places among the arguments, and the size of the batch.

    Remedy:
        Look at what the tokenizer or the collate function returns for a batch.

    Cannot see:
        Inputs that a model gets inside an object which is no container of tensors, and what is
        broadcast inside of it.
    """

    min_batch: int = 2

    code = "BATCH-SIZES"
    name = "an input has one sample where others have a batch"
    severity = "info"
    of_training = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        for event in events_of(recording, BatchSizesEvent):
            if event.batch < self.min_batch:
                continue
            model = names_of(recording, [event.root])
            yield Finding(
                code=self.code,
                severity=self.severity,
                site=f"{root_path(recording, event.root)}:in",
                step=event.step,
                message=f"{model} got one sample of input {event.input}, and {event.batch:,} of "
                f"{listed(list(event.others), 3)}, and this input changes from step to step: if it "
                f"is broadcast, all {event.batch:,} samples are computed with the same one.",
                evidence=BatchSizesEvidence(
                    input=event.input, batch=event.batch, others=list(event.others)
                ),
                confidence=0.6,
                remedy="Look at what the tokenizer or the collate function returns for a batch. "
                "Nothing is wrong if one value is meant for all samples.",
            )
