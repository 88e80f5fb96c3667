"""Which positions of a sequence the output at a position depends on, beside what it is asked for.

One position of the input is changed at a time, in evaluation mode, and it is seen at which
positions the output changes. If the targets are the inputs of the next positions, as in language
models, an output that depends on the next input can read its answer: the causal mask is missing, or
the wrong way round. If the targets are the inputs themselves, the output only has to copy.

Cannot see: models that return only a loss; targets of losses that are not PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.examination.differences import changed, numbers_in
from kedge.examination.loss_facts import Target
from kedge.examination.result import Grid, Result
from kedge.examination.step import ExaminedStep
from kedge.short_text import counted, percent

TRIAL = "positions"
MOST = 16
"""Most positions that are changed: those at the beginning."""
FEWEST = 3
"""Fewest positions of a sequence."""
SAME = 0.99
"""The share of targets that are inputs from which on they are taken to be."""
DID = "changed one position of the input, in eval()"


@dataclass(frozen=True)
class Sequence:
    """An input and an output that have the same positions in dimension 1.

    Attributes:
        name: The name of the input.
        given: The input, (samples, positions) or (samples, positions, features).
        output: The name of the output.
        length: The number of positions.
    """

    name: str
    given: Tensor
    output: str
    length: int


def positions(step: ExaminedStep) -> Iterator[Result]:
    """Yield what the outputs at positions depend on; nothing for models without sequences."""
    before = numbers_in(step.few.outputs())
    for found in _sequences(step, before):
        yield from _of_sequence(step, before, found)


def _of_sequence(
    step: ExaminedStep, before: dict[str, Tensor], found: Sequence
) -> Iterator[Result]:
    whole = step.inputs.numbers()[found.name]
    asked = next(filter(None, (_asked(target, whole) for target in step.targets())), None)
    tried = list(range(found.length))
    if asked is not None:
        tried = asked.positions
    tried = tried[:MOST]
    rows = []
    for position in tried:
        new = _changed_at(found.given, position)
        inputs = step.few.inputs.with_tensors({found.name: new})
        after = numbers_in(step.few.outputs(inputs)).get(found.output)
        if after is None or after.shape != before[found.output].shape:
            yield Result(TRIAL, "untried", DID, "the output has another shape each time")
            return
        hit = changed(before[found.output], after)
        rest = [each for each in range(hit.dim()) if each != 1]
        places: list[bool] = hit.any(dim=rest)[tried].tolist()
        rows.append(tuple(places))

    grid = Grid("positions", tuple(rows))
    if any(map(any, rows)):
        yield _judged(step, found, grid, asked)


def _judged(step: ExaminedStep, found: Sequence, grid: Grid, asked: _Asked | None) -> Result:
    size = len(grid.rows)
    later = sum(any(grid.rows[i][j] for i in range(j + 1, size)) for j in range(size))
    earlier = sum(any(grid.rows[i][j] for i in range(j)) for j in range(size))
    own = sum(grid.rows[j][j] for j in range(size))
    came = (
        f"of {counted(size, 'output')}, {own} depend on their own position of `{found.name}`, "
        f"{earlier} on earlier and {later} on later ones"
    )
    if asked is None or step.loss is None:
        return Result(TRIAL, "ok", DID, came, figure=grid)
    where = step.loss.where
    if asked.offset == 1 and later:
        means = (
            f"The target of a position is the next input ({percent(asked.share)} of them are), and "
            "the output there depends on it: it can read its answer. The causal mask is missing, "
            "or the wrong way round; is_causal=True, or a mask whose upper triangle is hidden, is "
            "what is wanted."
        )
        return Result(TRIAL, "wrong", DID, came, means, where, figure=grid)
    if asked.offset == 0 and own:
        means = (
            f"The targets are the inputs of the same positions ({percent(asked.share)} of them "
            "are): the output only has to copy. "
        )
        if later:
            means += "In an autoencoder, this is meant."
            return Result(TRIAL, "look", DID, came, means, where, figure=grid)
        means += "A language model predicts the next one: inputs[:, :-1] and targets[:, 1:]."
        return Result(TRIAL, "wrong", DID, came, means, where, figure=grid)
    return Result(TRIAL, "ok", DID, came, figure=grid)


def _sequences(step: ExaminedStep, outputs: dict[str, Tensor]) -> Iterator[Sequence]:
    """Yield each input with the first output that has the same positions."""
    for name, value in step.few.inputs.numbers().items():
        is_sequence = value.dim() == 3 or (value.dim() == 2 and not value.is_floating_point())
        if not is_sequence or value.dtype is torch.bool or value.shape[1] < FEWEST:
            continue
        if int(value.max() == value.min()):
            continue  # a mask that hides nothing
        for output, made in outputs.items():
            if made.dim() == 3 and made.shape[:2] == value.shape[:2]:
                yield Sequence(name, value, output, value.shape[1])
                break


def _changed_at(value: Tensor, position: int) -> Tensor:
    """Return a sequence with other values at one position, each of which stands somewhere in it."""
    new = value.detach().clone()
    here = value[:, position]
    if value.is_floating_point():
        new[:, position] = here + value.detach().std() * torch.randn_like(here)
        return new
    known = value.unique()
    at = torch.searchsorted(known, here.contiguous())
    new[:, position] = known[(at + 1) % len(known)]
    return new


@dataclass(frozen=True)
class _Asked:
    """What the targets ask for at the positions of a sequence.

    Attributes:
        offset: By how many positions the targets are ahead of the inputs, 0 or 1.
        share: The share of targets that are that input.
        positions: The positions with a target that counts.
    """

    offset: int
    share: float
    positions: list[int]


def _asked(target: Target, given: Tensor) -> _Asked | None:
    """Return what targets ask for if they are inputs themselves; None if they are not."""
    if given.is_floating_point() or not target.has_classes:
        return None
    count, length = given.shape
    wanted = target.target
    if wanted.numel() == count * length:
        wanted = wanted.reshape(count, length)
        pairs = {0: (wanted, given), 1: (wanted[:, :-1], given[:, 1:])}
    elif wanted.numel() == count * (length - 1):
        pairs = {1: (wanted.reshape(count, length - 1), given[:, 1:])}
    else:
        return None
    for offset, (asked, there) in pairs.items():
        counts = torch.ones_like(asked, dtype=torch.bool)
        if target.ignored is not None:
            counts = asked != target.ignored
        if not counts.any() or asked[counts].unique().numel() < 2:
            continue
        share = float((asked == there)[counts].double().mean())
        if share >= SAME:
            return _Asked(offset, share, counts.any(dim=0).nonzero().flatten().tolist())
    return None
