"""What the batch holds: the values of its inputs, and its targets.

Of tables, (samples, columns), and images it is also seen whether features are the same in all
samples, and whether some are far larger than others: a mean over all of them hides that.

The inputs of the next step are compared with those of this one: they may be the same again, or one
of them may have a single sample, another one each time, beside a batch of the others.

Cannot see: what other batches hold; targets of losses that are not PyTorch's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kedge.examination.loss_facts import Target
from kedge.examination.read_again import labels_differ
from kedge.examination.result import Result, in_short
from kedge.examination.step import ExaminedStep
from kedge.rules.training.same_batch import SameBatch
from kedge.short_text import compact, counted, listed, spans
from kedge.watch.records.facts.batch_sizes import one_beside_many

TRIAL = "batch"
LARGE = 20.0
"""The mean magnitude of an input from which on it is said not to be scaled."""
SMALL = 0.01
"""The same from below."""
DID = "looked at the values of the batch"
_FEWEST = 4
"""Fewest targets of which it is said that they are all the same."""
_FEWEST_ROWS = 16
"""Fewest samples by which features are judged."""
_SELDOM = 0.1
"""The share of zeros of all other features up to which one of nothing but zeros is named."""
APART = 1000.0
"""Times the usual magnitude of a feature from which on another is far larger, or smaller."""


def batch(step: ExaminedStep) -> Iterator[Result]:
    """Yield what is conspicuous in the inputs and targets."""
    found = [*_inputs(step), *_next_inputs(step), *_targets(step), *_labels(step)]
    yield from found
    if not found:
        shapes = [f"{name} {tuple(v.shape)}" for name, v in step.inputs.numbers().items()]
        yield Result(TRIAL, "ok", DID, ", ".join(shapes) or "no tensors")


def _inputs(step: ExaminedStep) -> Iterator[Result]:
    for name, value in step.inputs.numbers().items():
        if value.is_floating_point():
            yield from _numbers(step, name, value)
            yield from _features(step, name, value)
        batch = step.samples
        if batch is None or not batch.of(value) or batch.count < _FEWEST:
            continue
        if value.dtype is torch.bool or "mask" in name:
            continue
        rows = value.detach().movedim(batch.dim, 0)
        rows = rows.reshape(rows.shape[0], -1)
        if rows.shape[1] < 2 or bool((rows == rows[:, :1]).all()):
            continue  # labels, lengths, a mask that hides nothing
        different = torch.unique(rows, dim=0).shape[0]
        if different <= rows.shape[0] // 2:
            came = f"`{name}` has {different} different rows among {rows.shape[0]}"
            means = "Samples are repeated within the batch: see how it is drawn and collated."
            yield Result(TRIAL, "look", DID, came, means)


def _next_inputs(step: ExaminedStep) -> Iterator[Result]:
    """Yield what the inputs of the next step show: the same batch again, or one sample for all others."""
    if step.later is None:
        return
    did = "compared the inputs of the first two steps"
    now, later = step.inputs.numbers(), step.later.numbers()
    is_same = bool(now) and now.keys() == later.keys()
    if is_same and all(torch.equal(now[name], later[name]) for name in now):
        if _is_part_of_data(step):
            came = f"the model was given the same ones again: {listed([f'`{n}`' for n in now], 4)}"
            means = (
                "Draw the batch inside of the loop, and go on with one iterator of the data loader: "
                "next(iter(loader)) begins anew each time. It is meant if these are all data, or if "
                "one batch is to be fitted as a trial."
            )
            yield Result(TRIAL, "look", did, came, means)
        return
    odd = one_beside_many(list(now.items()))
    if odd is None or odd.name not in later or odd.value.shape != later[odd.name].shape:
        return
    if not torch.equal(odd.value, later[odd.name]):
        others = listed([f"`{name}`" for name in odd.others], 3)
        came = f"`{odd.name}` has one sample, another one in each step, and {others} {odd.batch}"
        means = (
            "If it is broadcast, all samples are computed with the same one: look at what the "
            "tokenizer or the collate function returns for a batch. What serves all samples, such "
            "as a prompt that is drawn anew, is meant."
        )
        yield Result(TRIAL, "look", did, came, means)


def _is_part_of_data(step: ExaminedStep) -> bool:
    """Whether a batch is only a part of the data: of those of the loader, or by its usual size."""
    if step.samples is None:
        return False
    count = step.samples.count
    try:
        return len(step.data) > count
    except (TypeError, NotImplementedError):  # no loader, or a stream
        return count.bit_count() == 1 and _FEWEST <= count <= SameBatch().most_in_batch


def _numbers(step: ExaminedStep, name: str, value: Tensor) -> Iterator[Result]:
    numbers = value.detach().double()
    bad = int((~numbers.isfinite()).sum())
    if bad:
        if not bool(numbers.isnan().any()) and numbers[numbers.isfinite()].unique().numel() <= 1:
            return  # a mask of infinities
        came = f"`{name}` has {counted(bad, 'element')} of {numbers.numel()} that are not finite"
        if step.loss is not None and not math.isfinite(step.loss.value):
            means = "The loss is not finite either: mend or leave out these samples."
            yield Result(TRIAL, "wrong", DID, came, means)
            return
        means = "The first loss is finite: the model leaves them out, or they are not in it yet."
        yield Result(TRIAL, "look", DID, came, means)
        return
    size = float(numbers.abs().mean())
    if numbers.numel() < 2:
        return
    is_constant = bool((numbers == numbers.reshape(-1)[0]).all())
    if is_constant:
        if size not in (0.0, 1.0):
            came = f"every element of `{name}` is {compact(float(numbers.reshape(-1)[0]))}"
            yield Result(TRIAL, "look", DID, came, "An input that is constant says nothing.")
    elif size > LARGE or 0 < size < SMALL:
        came = (
            f"`{name}` has mean {compact(float(numbers.mean()))}, standard deviation "
            f"{compact(float(numbers.std()))}, from {compact(float(numbers.min()))} to "
            f"{compact(float(numbers.max()))}"
        )
        means = (
            "The usual initializations expect inputs of mean 0 and deviation 1. Scale it, unless "
            "the model does that itself."
        )
        yield Result(TRIAL, "look", DID, came, means)


def _features(step: ExaminedStep, name: str, value: Tensor) -> Iterator[Result]:
    """Yield the features that are the same in all samples, and those of another scale than the others."""
    batch = step.samples
    if batch is None or batch.dim != 0 or not batch.of(value) or batch.count < _FEWEST_ROWS:
        return
    if value.dim() not in (2, 4) or value.shape[1] < 2 or not bool(value.isfinite().all()):
        return
    columns = value.detach().double().transpose(0, 1).reshape(value.shape[1], -1)
    is_constant = (columns == columns[:, :1]).all(dim=1)
    if bool(is_constant.all()):
        return
    zeros = float((columns[~is_constant] == 0).double().mean())
    is_named = is_constant
    if zeros > _SELDOM:
        is_named = is_constant & (columns[:, 0] != 0)
    if bool(is_named.any()):
        places = is_named.nonzero().flatten().tolist()
        held = listed([compact(number) for number in columns[is_named, 0].unique().tolist()], 3)
        came = (
            f"{counted(len(places), 'feature')} of `{name}` is the same in all "
            f"{batch.count} samples: {spans(places)}, which holds {held}"
        )
        if len(places) > 1:
            came = came.replace(" is the same", " are the same").replace(
                "which holds", "which hold"
            )
        means = (
            "What is the same for all samples tells none from another, except the 1 of a bias. See "
            "whether it is so in all data, and what filled it: a default, a failed join, a scaler."
        )
        yield Result(TRIAL, "look", DID, came, means)

    sizes = columns.abs().mean(dim=1)
    usual = float(sizes[~is_constant].median())
    if usual == 0:
        return
    is_apart = ~is_constant & ((sizes > APART * usual) | (sizes * APART < usual))
    is_apart |= ~is_constant & (sizes > LARGE) & (float(value.abs().double().mean()) <= LARGE)
    if value.dim() == 2 and zeros <= _SELDOM and bool(is_apart.any()):
        places = is_apart.nonzero().flatten().tolist()
        came = (
            f"{counted(len(places), 'feature')} of `{name}` of another scale than the others, whose "
            f"usual magnitude is {compact(usual)}: {spans(places)}, of "
            f"{compact(float(sizes[is_apart].min()))} to {compact(float(sizes[is_apart].max()))}"
        )
        means = (
            "The largest decide what the first layer returns, and the smallest are as good as not "
            "there. Scale each feature by itself: to mean 0 and deviation 1, or by its logarithm."
        )
        yield Result(TRIAL, "look", DID, came, means)


def _labels(step: ExaminedStep) -> Iterator[Result]:
    did = "read samples of the data set twice"
    try:
        differing = labels_differ(step.data)
    except Exception as error:  # noqa: BLE001 - the program's own code, called by others than itself
        yield Result(TRIAL, "untried", did, f"they cannot be read: {in_short(error)}")
        return
    if differing:
        came = f"the inputs were the same, and the labels were not, of {listed(list(map(str, differing)))}"
        means = "A label that is drawn by chance cannot be learned. See whether that is meant."
        yield Result(TRIAL, "look", did, came, means)


def _targets(step: ExaminedStep) -> Iterator[Result]:
    if step.loss is not None and step.loss.broadcast is not None:
        spread = step.loss.broadcast
        came = f"{spread.by} makes {spread.to} of predictions of shape {spread.shape} and targets"
        means = (
            "Each prediction is compared with each target, and the mean of the targets is learned. "
            "Give both one shape: squeeze the predictions, or unsqueeze the targets."
        )
        yield Result(TRIAL, "wrong", DID, came, means, step.loss.where)
    for target in step.targets():
        counts = target.counted()
        where = step.where
        if counts.numel() == 0:
            came = f"all {target.target.numel()} targets are the ignored class {target.ignored}"
            means = "There is nothing to learn from this batch."
            yield Result(TRIAL, "wrong", DID, came, means, where)
            continue
        if counts.is_floating_point() and not bool(counts.isfinite().all()):
            came = f"{int((~counts.isfinite()).sum())} of {counts.numel()} targets are not finite"
            means = "The loss is not finite either: mend or leave out these samples."
            yield Result(TRIAL, "wrong", DID, came, means, where)
            continue
        is_adversary = step.training is not None and step.training.has_several
        if counts.numel() >= _FEWEST and not is_adversary and bool((counts == counts[0]).all()):
            came = f"all {counts.numel()} targets are {compact(float(counts[0]))}"
            means = (
                "A model that always says the same has no loss. See whether the data is sorted by "
                "class, or the labels are read from the wrong column."
            )
            yield Result(TRIAL, "look", DID, came, means, where)
        elif target.has_chances:
            yield from _chances(target, counts, where)


def _chances(target: Target, counts: Tensor, where: str) -> Iterator[Result]:
    low, high = float(counts.min()), float(counts.max())
    if low < 0 or high > 1:
        came = f"the targets of {target.loss} are between {compact(low)} and {compact(high)}"
        means = "They have to be probabilities: beyond 0 and 1 the loss has no lower end."
        yield Result(TRIAL, "wrong", DID, came, means, where)
