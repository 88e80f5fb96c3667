"""The inputs of a step whose samples are filled up at their end to one length, and what tells the model so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kedge.examination.step import ExaminedStep

_Found = tuple[Tensor, int, str | None]
FEWEST = 3
"""Fewest positions of a sequence."""


@dataclass(frozen=True)
class PaddedInput:
    """A sequence, (samples, positions) or (samples, positions, features), whose samples end in padding.

    Attributes:
        name: The name of the input.
        value: The input.
        lengths: How many positions of each sample are no padding.
        filler: The number that stands for padding; 0 of features.
        told_by: The name of another input that says which positions are padding, as a mask or
            lengths; "" if none does.
        embedding: The path of an embedding whose `padding_idx` is that number; None without one.
    """

    name: str
    value: Tensor
    lengths: Tensor
    filler: int
    told_by: str
    embedding: str | None

    @property
    def is_padding(self) -> Tensor:
        """Whether each position is padding, as (samples, positions)."""
        at = torch.arange(self.value.shape[1], device=self.value.device)
        return at >= self.lengths[:, None]


def padded_inputs(step: ExaminedStep) -> Iterator[PaddedInput]:
    """Yield the sequences that are padded, as far as it is certain."""
    batch = step.samples
    if batch is None or batch.dim != 0:
        return
    given = step.inputs.numbers()
    for name, value in given.items():
        if not batch.of(value) or value.dim() not in (2, 3) or value.shape[1] < FEWEST:
            continue
        found: _Found | None = None
        if value.is_floating_point():
            if value.dim() == 3:
                found = _of_features(value)
        elif value.dim() == 2 and value.dtype is not torch.bool and value.unique().numel() > 2:
            found = _of_numbers(step.model, value)
        if found is None:
            continue
        lengths, filler, embedding = found
        told_by = _teller(given, name, value, lengths)
        yield PaddedInput(name, value, lengths, filler, told_by, embedding)


def _of_numbers(model: nn.Module, value: Tensor) -> _Found | None:
    """Return lengths, filler and embedding of numbers of tokens; None if they are not padded."""
    ends = [end for end in value[:, -1].unique().tolist() if end >= 0]  # below, labels are ignored
    for path, module in model.named_modules():
        filler = getattr(module, "padding_idx", None)
        if isinstance(filler, int) and filler in ends:
            lengths = lengths_before(value == filler)
            if _are_several(lengths):
                return lengths, filler, path
    for filler in ends:
        lengths = lengths_before(value == filler)
        is_only_padding = int((value == filler).sum()) == int((value.shape[1] - lengths).sum())
        if is_only_padding and _are_several(lengths):
            return lengths, int(filler), None
    return None


def _of_features(value: Tensor) -> _Found | None:
    lengths = lengths_before((value == 0).all(dim=-1))
    if not _are_several(lengths):
        return None
    return lengths, 0, None


def lengths_before(is_filler: Tensor) -> Tensor:
    """Return how many positions of each row come before the run of fillers at its end."""
    at = torch.arange(1, is_filler.shape[1] + 1, device=is_filler.device)
    return (at * ~is_filler).amax(dim=1)


def _are_several(lengths: Tensor) -> bool:
    """Whether samples have several lengths, as those that are filled up to the longest have."""
    return lengths.unique().numel() > 2 and int(lengths.min()) > 0


def _teller(given: Mapping[str, Tensor], name: str, value: Tensor, lengths: Tensor) -> str:
    """Return the name of the input that says what is padding; "" without one."""
    at = torch.arange(value.shape[1], device=value.device)
    is_real = at < lengths[:, None]
    for other, told in given.items():
        if other == name:
            continue
        if told.shape == lengths.shape and torch.equal(told.to(lengths.dtype), lengths):
            return other
        if told.shape == is_real.shape and told.unique().numel() == 2:
            is_high = told == told.max()
            if torch.equal(is_high, is_real) or torch.equal(is_high, ~is_real):
                return other
    return ""
