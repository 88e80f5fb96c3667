"""Whether the output for a sample depends on the other samples of its batch, and where they mix.

Each of the first samples is replaced by another one, in evaluation mode, and it is seen for which
samples the output changes. In evaluation mode batch normalization uses its running statistics, so
the outputs of samples are apart unless a view, a softmax or an order of dimensions mixes them.

Which dimension counts the samples is known from the data loader; without one it is taken to be the
first, and what mixes there is something to look at: it may be a sequence, or the nodes of a graph.

Cannot see: models that return only a loss; samples that mix in training alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kedge.examination.differences import changed, numbers_in
from kedge.examination.model_inputs import ModelInputs
from kedge.examination.places import Place, first_place
from kedge.examination.result import Grid, Result, Verdict
from kedge.examination.step import ExaminedStep, samples_of
from kedge.short_text import counted

TRIAL = "samples"
MOST = 8
"""Most samples that are replaced."""
MOST_SEEN = 64
"""Most samples whose outputs are compared."""
DID = "replaced one sample of the batch by another, in eval()"


def samples(step: ExaminedStep) -> Iterator[Result]:
    """Yield whether samples are apart."""
    count = step.samples
    if count is None or not step.batch_dims:
        yield Result(TRIAL, "untried", DID, "no input is known to hold a batch of samples")
        return
    if count < 2:
        yield Result(TRIAL, "untried", DID, "the batch has one sample")
        return
    before = numbers_in(step.run.outputs())
    dims = {name: samples_of(value, count) for name, value in before.items()}
    kept = {name: dim for name, dim in dims.items() if dim is not None}
    if not kept:
        yield Result(TRIAL, "untried", DID, f"no output has a dimension of {count} samples")
        return

    rows = []
    for sample in range(min(count, MOST)):
        after = numbers_in(step.run.outputs(replaced(step, sample)))
        rows.append(_hit(before, after, kept, min(count, MOST_SEEN)))
    found = Grid("samples", tuple(rows))
    if not any(map(any, rows)):
        return  # `data-used` says it
    others = found.off_diagonal()
    if not any(others):
        came = f"only its own output changed, for each of {counted(len(rows), 'sample')}"
        yield Result(TRIAL, "ok", DID, came, figure=found)
        return

    place = _first_mixing(step)
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
    if not step.knows_samples:
        verdict = "look"
        means = (
            f"Dimension 0, of {count}, was taken to count the samples. If it counts steps of a "
            "sequence or nodes of a graph, this is meant; otherwise: " + means
        )
    yield Result(TRIAL, verdict, DID, came, means, place.line, figure=found)


def replaced(step: ExaminedStep, sample: int) -> ModelInputs:
    """Return the inputs of a step with one sample replaced by the next one.

    Where all samples are alike, numbers are drawn anew.
    """
    new = {}
    given = step.inputs.numbers()
    for name, dim in step.batch_dims.items():
        value = given[name]
        other = (sample + 1) % value.shape[dim]
        row = value.select(dim, other)
        if value.is_floating_point() and torch.equal(row, value.select(dim, sample)):
            row = row + torch.randn_like(row)
        new[name] = value.detach().clone()
        new[name].select(dim, sample).copy_(row.detach())
    return step.inputs.with_tensors(new)


def _hit(
    before: dict[str, Tensor], after: dict[str, Tensor], dims: dict[str, int], most: int
) -> tuple[bool, ...]:
    """Return for each of the first samples whether its output changed."""
    hit = torch.zeros(most, dtype=torch.bool)
    for name, dim in dims.items():
        now = after.get(name)
        if now is None or now.shape != before[name].shape:
            continue
        changes = changed(before[name], now).movedim(dim, 0)[:most]
        hit |= changes.reshape(most, -1).any(dim=1).cpu()
    return tuple(hit.tolist())


def _first_mixing(step: ExaminedStep) -> Place:
    """Return where the change of the first sample first reaches another one."""

    def is_mixed(changes: Tensor) -> bool:
        dim = samples_of(changes, step.samples)
        if dim is None:
            return False
        others = changes.narrow(dim, 1, changes.shape[dim] - 1)
        return bool(others.any())

    return first_place(step.model, step.run.passed(), step.run.passed(replaced(step, 0)), is_mixed)
