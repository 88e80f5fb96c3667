"""Whether outputs depend on the padding with which samples are filled up to one length.

A sample is run by itself and without its padding, and its output is compared with that in the
batch. Where a mask or lengths tell the model what is padding, other values are put there, too, and
the mask stays. If the output at a real position changes then, and does not when other real
positions change, and with the mask turned round it is the other way about, then the mask hides
what it should show.

Cannot see: padding at the beginning; samples that are all of one or two lengths; losses that are
not PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.examination.differences import differ, numbers_in
from kedge.examination.model_inputs import ModelInputs
from kedge.examination.padded_inputs import PaddedInput, lengths_before, padded_inputs
from kedge.examination.result import Result
from kedge.examination.step import ExaminedStep
from kedge.short_text import percent

TRIAL = "padding"
DID_ALONE = "ran a sample without its padding, in eval()"
DID_OTHER = "put other values in place of the padding, in eval()"
DID_TARGETS = "looked for padding among the targets"
FAR = 1e-3
"""The norm of a difference, as a share of that of the output, that no rounding makes."""


def padding(step: ExaminedStep) -> Iterator[Result]:
    """Yield what depends on padding; nothing for models whose inputs have none."""
    before = step.outputs
    found = list(padded_inputs(step))
    if found and differ(before, numbers_in(step.run.outputs())):
        yield Result(TRIAL, "untried", DID_ALONE, "the output differs from run to run")
        return
    for padded in found:
        seen = _Seen(step, padded, before)
        if padded.told_by:
            yield _of_content(seen)
        yield _of_amount(seen)
    yield from _in_targets(step, found)


@dataclass(frozen=True)
class _Seen:
    """A padded input, with the output that it gave.

    Attributes:
        step: The step.
        padded: The input.
        before: The outputs of the batch, by name.
    """

    step: ExaminedStep
    padded: PaddedInput
    before: dict[str, Tensor]

    def output(self, sample: int, outputs: dict[str, Tensor]) -> Tensor | None:
        """Return what a sample has in an output: at its real positions, or all of it if it has none."""
        length = int(self.padded.lengths[sample])
        for value in outputs.values():
            if value.dim() == 0 or value.shape[0] <= sample:
                continue
            own = value[sample]
            if own.dim() > 1 and own.shape[0] >= length:
                return own[:length]
            return own
        return None

    @property
    def most_padded(self) -> int:
        """The sample with most padding."""
        return int(self.padded.lengths.argmin())


def _of_content(seen: _Seen) -> Result:
    """Return whether the output depends on what stands in the padding."""
    padded = seen.padded
    by = f"`{padded.told_by}` says what is padding of `{padded.name}`"
    after = numbers_in(seen.step.run.outputs(_with_other_values(seen, padded.is_padding)))
    hit = [
        sample
        for sample in range(len(padded.lengths))
        if _is_far(seen.output(sample, seen.before), seen.output(sample, after))
    ]
    if not hit:
        came = f"{by}, and no output of a real position changes"
        return Result(TRIAL, "ok", DID_OTHER, came)
    came = f"{by}, and outputs of real positions change with it, in {len(hit)} of {len(padded.lengths)} samples"
    if _is_reversed(seen):
        means = (
            "They do not change with other real positions: the mask is the wrong way round. "
            "key_padding_mask is True where PyTorch is to look away, and attention_mask is 1 where "
            "Transformers is to look."
        )
        return Result(TRIAL, "wrong", DID_OTHER, came, means)
    means = (
        "What is to be ignored is read: see whether the mask reaches every layer that mixes "
        "positions. What adds up positions, or reads across the border as a convolution does, may "
        "rely on padding that is zero, and is right as long as it is."
    )
    return Result(TRIAL, "look", DID_OTHER, came, means)


def _is_reversed(seen: _Seen) -> bool:
    """Whether the mask is the wrong way round, which is certain if turning it round mends it.

    As it is, some output at a first position follows the padding and no other real position; with
    the mask turned round it follows other real positions and not the padding.
    """
    mask = seen.step.inputs.numbers()[seen.padded.told_by]
    if mask.dim() != 2:
        return False
    as_it_is = _first_positions(seen, mask)
    turned = _first_positions(seen, _turned(mask))
    return any(
        one.reads_padding
        and not one.reads_others
        and other.reads_others
        and not other.reads_padding
        for one, other in zip(as_it_is, turned, strict=True)
    )


def _turned(mask: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        return ~mask
    return mask.max() + mask.min() - mask


@dataclass(frozen=True)
class _Follows:
    """What the output at the first position of a sample follows.

    Attributes:
        reads_padding: Whether it changes with the padding.
        reads_others: Whether it changes with the other real positions.
    """

    reads_padding: bool
    reads_others: bool


def _first_positions(seen: _Seen, mask: Tensor) -> list[_Follows]:
    """Return what the outputs at first positions follow under a mask, of samples with some padding."""
    padded, told_by = seen.padded, seen.padded.told_by

    def outputs(where: Tensor | None) -> dict[str, Tensor]:
        inputs = seen.step.inputs
        if where is not None:
            inputs = _with_other_values(seen, where)
        return numbers_in(seen.step.run.outputs(inputs.with_tensors({told_by: mask})))

    others = ~padded.is_padding
    others[:, 0] = False
    before, other_padding, other_real = outputs(None), outputs(padded.is_padding), outputs(others)
    return [
        _Follows(
            _is_far(_at_first(seen, sample, before), _at_first(seen, sample, other_padding)),
            _is_far(_at_first(seen, sample, before), _at_first(seen, sample, other_real)),
        )
        for sample, length in enumerate(padded.lengths.tolist())
        if 1 < length < padded.value.shape[1]
    ]


def _at_first(seen: _Seen, sample: int, outputs: dict[str, Tensor]) -> Tensor | None:
    """Return what a sample has at its first position, or its whole output if it has no positions."""
    own = seen.output(sample, outputs)
    if own is not None and own.dim() > 1:
        return own[0]
    return own


def _with_other_values(seen: _Seen, where: Tensor) -> ModelInputs:
    """Return the inputs with other values at some positions of the padded one: such as stand elsewhere in it."""
    padded = seen.padded
    new = padded.value.detach().clone()
    if new.is_floating_point():
        noise = torch.randn_like(new) * new.std()
        new[where] = noise[where]
    else:
        known = new.unique()
        known = known[known != padded.filler]
        at = torch.searchsorted(known, new.clamp(known[0], known[-1]).contiguous())
        new[where] = known[(at + 1) % len(known)][where]
    return seen.step.inputs.with_tensors({padded.name: new})


def _of_amount(seen: _Seen) -> Result:
    """Return whether a sample has another output without its padding."""
    padded = seen.padded
    sample = seen.most_padded
    length = int(padded.lengths[sample])
    try:
        alone = numbers_in(seen.step.run.outputs(_alone(seen, sample, length)))
    except Exception as error:  # noqa: BLE001 - the program's own code, with a shorter batch
        came = f"the model takes no sample of another length ({type(error).__name__})"
        return Result(TRIAL, "untried", DID_ALONE, came)
    own = seen.output(sample, seen.before)
    other = next((value[0] for value in alone.values() if value.shape[:1] == (1,)), None)
    if own is None or other is None or own.shape != other.shape:
        return Result(TRIAL, "untried", DID_ALONE, "the output has another shape")
    of = f"{padded.value.shape[1] - length} of {padded.value.shape[1]} positions of `{padded.name}`"
    off = _distance(own, other)
    if off <= FAR:
        return Result(TRIAL, "ok", DID_ALONE, f"without {of}, its output is the same")
    came = f"without {of}, its output differs by {percent(off)}"
    means = (
        "What is said of a sample depends on how long the longest of its batch is. A recurrent "
        "layer wants the state after the last real position (pack_padded_sequence), a mean real "
        "positions alone, an attention a mask. It is meant where every sample is filled up to one "
        "fixed length."
    )
    if padded.embedding is not None:
        means += f" padding_idx of {padded.embedding} only keeps that row from being trained."
    return Result(TRIAL, "look", DID_ALONE, came, means)


def _alone(seen: _Seen, sample: int, length: int) -> ModelInputs:
    """Return the inputs of one sample, cut to a length where they have the positions of the padded one."""
    count, positions = seen.padded.value.shape[:2]
    new = {}
    for name, value in seen.step.inputs.numbers().items():
        if value.shape[0] != count:
            continue
        own = value.detach()[sample : sample + 1]
        if own.dim() > 1 and own.shape[1] == positions:
            own = own[:, :length]
        new[name] = own.contiguous()
    return seen.step.inputs.with_tensors(new)


def _in_targets(step: ExaminedStep, found: list[PaddedInput]) -> Iterator[Result]:
    """Yield whether a loss counts positions of the targets that are filled up as an input is."""
    for padded in found:
        if padded.value.is_floating_point():
            continue
        count = len(padded.lengths)
        for target in step.targets():
            if not target.has_classes or target.target.numel() % count:
                continue
            wanted = target.target.reshape(count, -1)
            if wanted.shape[1] < 2 or padded.filler == target.ignored:
                continue
            is_filler = wanted == padded.filler
            padded_targets = int((wanted.shape[1] - lengths_before(is_filler)).sum())
            if not 0 < padded_targets == int(is_filler.sum()):
                continue
            share = percent(padded_targets / wanted.numel())
            came = (
                f"{share} of the targets are {padded.filler}, with which `{padded.name}` is filled "
                "up, and the loss counts them"
            )
            means = (
                "The model is trained to say padding, which is easy and lowers the loss. Give the "
                f"loss ignore_index={padded.filler}, unless that number also ends a sequence."
            )
            yield Result(TRIAL, "look", DID_TARGETS, came, means, step.where)
            return


def _is_far(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    return _distance(one, other) > FAR


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference of two outputs, as a share of that of the first."""
    first, second = torch.nan_to_num(one.double()), torch.nan_to_num(other.double())
    size = max(float(first.norm()), float(second.norm()))
    if size == 0:
        return 0.0
    return float((first - second).norm()) / size
