"""Whether the output for a sample depends on the other samples of its batch, and where they mix.

Each of the first samples is replaced by another one, in evaluation mode, and it is seen for which
samples the output changes. In evaluation mode batch normalization uses its running statistics, so
the outputs of samples are apart unless a view, a softmax or an order of dimensions mixes them.

Which dimension counts the samples is known from the data loader, unless another dimension has the
same size. Without that it is taken to be the first, and what mixes there is something to look at:
it may be a sequence, or the nodes of a graph.

Cannot see: models that return only a loss, or whose output differs from run to run;
samples that mix in training alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from kedge.examination.differences import changed, numbers_in
from kedge.examination.model_inputs import ModelInputs
from kedge.examination.places import Place, first_place
from kedge.examination.result import Grid, Result, Verdict
from kedge.examination.step import ExaminedStep, SampleDimension
from kedge.short_text import counted, listed

TRIAL = "samples"
MOST = 8
"""Most samples that are replaced."""
MOST_SEEN = 64
"""Most samples whose outputs are compared."""
DID = "replaced one sample of the batch by another, in eval()"


def samples(step: ExaminedStep) -> Iterator[Result]:
    """Yield whether samples are apart."""
    batch = step.samples
    if batch is None:
        yield Result(TRIAL, "untried", DID, "no input is known to hold a batch of samples")
        return
    if batch.count < 2:
        yield Result(TRIAL, "untried", DID, "the batch has one sample")
        return
    first = _of_samples(step.outputs, batch)
    if first is None:
        yield Result(TRIAL, "untried", DID, f"the output has no dimension of {batch.count} samples")
        return
    again = _of_samples(numbers_in(step.run.outputs()), batch)
    if again is None or bool(changed(first, again).any()):
        yield Result(TRIAL, "untried", DID, "the output differs from run to run")
        return

    rows = []
    for sample in range(min(batch.count, MOST)):
        inputs = replaced(step, batch, sample)
        after = _of_samples(numbers_in(step.run.outputs(inputs)), batch)
        if after is None or after.shape != first.shape:
            yield Result(TRIAL, "untried", DID, "the output has another shape each time")
            return
        rows.append(_hit(first, after, batch))
    if not any(map(any, rows)):
        return  # `data-used` says it
    found = Grid("samples", tuple(rows))
    others = found.off_diagonal()
    if not any(others):
        came = f"only its own output changed, for each of {counted(len(rows), 'sample')}"
        yield Result(TRIAL, "ok", DID, came, figure=found)
        return

    place = _first_mixing(step, batch)
    came = (
        f"the outputs for up to {max(others)} of {counted(len(rows[0]) - 1, 'other sample')} "
        f"changed too{place.text}"
    )
    verdict: Verdict = "wrong"
    means = (
        "A prediction depends on what else is in the batch. Look for a view or reshape that takes "
        "one dimension for another, a softmax or norm over dimension 0, a recurrent layer or an "
        "attention that wants batch_first=True."
    )
    statistics = [name for name, each in step.model.named_modules() if _uses_the_batch(each)]
    if statistics:
        verdict = "look"
        means = (
            "Batch norms without running statistics use those of the batch in evaluation, too: "
            f"{listed(statistics, 4)}."
        )
    elif not batch.is_certain or (step.training is not None and step.training.has_several):
        verdict = "look"
        means = (
            f"Dimension {batch.dim}, of {batch.count}, was taken to count the samples. If it counts "
            "steps of a sequence or nodes of a graph, or if the samples are to be compared, this is "
            "meant; otherwise: " + means
        )
    yield Result(TRIAL, verdict, DID, came, means, place.line, figure=found)


def _of_samples(outputs: Mapping[str, Tensor], batch: SampleDimension) -> Tensor | None:
    """Return the first output that has the samples in one dimension, and in no other one its size."""
    for value in outputs.values():
        if batch.of(value) and list(value.shape).count(batch.count) == 1:
            return value
    return None


def _uses_the_batch(module: nn.Module) -> bool:
    has_statistics = getattr(module, "running_mean", module) is not None
    return hasattr(module, "track_running_stats") and not has_statistics


def replaced(step: ExaminedStep, batch: SampleDimension, sample: int) -> ModelInputs:
    """Return the inputs of a step with one sample replaced by the next one.

    Where all samples are alike, numbers are drawn anew.
    """
    new = {}
    for name, value in step.inputs.numbers().items():
        if not batch.of(value):
            continue
        other = (sample + 1) % batch.count
        row = value.select(batch.dim, other)
        if value.is_floating_point() and torch.equal(row, value.select(batch.dim, sample)):
            row = row + torch.randn_like(row)
        new[name] = value.detach().clone()
        new[name].select(batch.dim, sample).copy_(row.detach())
    return step.inputs.with_tensors(new)


def _hit(before: Tensor, after: Tensor, batch: SampleDimension) -> tuple[bool, ...]:
    """Return for each of the first samples whether its output changed."""
    most = min(batch.count, MOST_SEEN)
    changes = changed(before, after).movedim(batch.dim, 0)[:most]
    hit: list[bool] = changes.reshape(most, -1).any(dim=1).tolist()
    return tuple(hit)


def _first_mixing(step: ExaminedStep, batch: SampleDimension) -> Place:
    """Return where the change of the first sample first reaches another one."""

    def is_mixed(changes: Tensor) -> bool:
        return batch.of(changes) and bool(changes.narrow(batch.dim, 1, batch.count - 1).any())

    other = step.run.passed(replaced(step, batch, 0))
    return first_place(step.model, step.run.passed(), other, is_mixed)
