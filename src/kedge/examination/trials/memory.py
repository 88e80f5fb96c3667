"""What a step keeps for its backward, what it would keep under `kedge.offload`, and the batch that no longer fits.

The model is called with the batch, and with a part of it, and what autograd keeps is counted each
time (`kedge.saved`). If a third size keeps what the two say that it would, bytes grow in proportion
to the samples, and the largest batch is inferred from the memory that is free: it is not tried. What
the loss keeps is counted by computing it again, and taken to grow with the samples.

Cannot see: memory that is needed for a moment only, such as the workspace of a convolution; what
other programs take later.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kedge.examination.model_inputs import ModelInputs
from kedge.examination.result import Result, in_short
from kedge.examination.step import ExaminedStep, SampleDimension
from kedge.offload.account.tensors import SavedTensors
from kedge.offload.plan.trial import room_on
from kedge.short_text import counted, listed, sized, thousands
from kedge.store.saved_account import LineSums, Sums
from kedge.torch_internals.source_lines import source_of
from kedge.watch.models.backward_start import programs_line

TRIAL = "memory"
DID = "counted what autograd keeps for the backward of this batch"
DID_PLAN = "looked up what kedge.offload would leave of it"
DID_LIMIT = "inferred the largest batch from the bytes of two, without trying it"
MOST_MODULES = 3
"""Modules that are named as those that keep most."""
STRAIGHT = 0.02
"""The share by which the bytes of a third size may be off the line through two."""


def memory(step: ExaminedStep) -> Iterator[Result]:
    """Yield what is kept and where, what could be left, and which batch would no longer fit."""
    account = step.run.saved()
    if account.total.bytes == 0:
        yield Result(TRIAL, "untried", DID, "the model's call keeps nothing")
        return
    beside = _bytes_of_loss(step, account)
    yield _kept(step, account, beside)
    yield _plans(account)
    yield _limit(step, account, beside or 0)


def _bytes_of_loss(step: ExaminedStep, account: SavedTensors) -> int | None:
    """Return the bytes that the step keeps outside of the model; None if it cannot be computed again."""
    if step.whole is None:
        return None
    try:
        whole = step.run.saved_with_loss(step.whole, [step.model, *step.others])
    except Exception:  # noqa: BLE001 - the program's own code, called by others than itself
        return None
    return max(whole.total.bytes - account.total.bytes, 0)


def _kept(step: ExaminedStep, account: SavedTensors, beside: int | None) -> Result:
    holders = sorted(account.by_module(), key=lambda sums: -sums.bytes)
    named = [
        f"{sums.path or step.name} {sized(sums.bytes)}"
        for sums in holders[:MOST_MODULES]
        if sums.bytes
    ]
    came = sized(account.total.bytes)
    if step.samples is not None:
        came += f" for {counted(step.samples.count, 'sample')}"
    came += f", most in {listed(named)}"
    if beside:
        came += f"; outside of the model, as in the loss, {sized(beside)}"
    where = next((line.place for line in account.by_line() if _is_in_model(line)), "")
    numbers = {"bytes": account.total.bytes}
    if beside is not None:
        numbers["bytes_outside"] = beside
    return Result(TRIAL, "ok", DID, came, "", where, numbers=numbers)


def _is_in_model(line: LineSums) -> bool:
    """Whether a line is one of the model's code, and not that from which the model is examined."""
    if line.file is None:
        return False
    around = programs_line(sys._getframe())  # noqa: SLF001
    return around is None or line.place != str(source_of(around))


def _plans(account: SavedTensors) -> Result:
    total = account.total
    rebuilt, moved = total.bytes - total.rebuild, total.bytes - total.offload
    numbers = {"bytes_rebuilt": rebuilt, "bytes_moved": moved}
    parts = []
    if total.rebuild:
        parts.append(f"{sized(rebuilt)} if what can be computed exactly is not kept")
    if total.offload:
        parts.append(f"at least {sized(moved)} with to=kedge.Cpu() or kedge.Disk()")
    recomputed = _recomputed(account)
    if recomputed is not None:
        numbers["bytes_recomputed"] = recomputed.kept
        numbers["bytes_of_largest_block"] = recomputed.most
        parts.append(
            f'{sized(recomputed.kept)} with recompute="{recomputed.pattern}", and '
            f"{sized(recomputed.most)} more while one of them runs again"
        )
    came = f"of {sized(total.bytes)}, {'; '.join(parts) or 'all of it'}"
    return Result(TRIAL, "ok", DID_PLAN, came, numbers=numbers)


@dataclass(frozen=True)
class _Recomputed:
    """What is kept if the blocks of a model are recomputed.

    Attributes:
        pattern: The selector of the blocks.
        kept: The bytes that are kept between forward and backward.
        most: The bytes of the largest block, which are there again while it is recomputed.
    """

    pattern: str
    kept: int
    most: int


def _recomputed(account: SavedTensors) -> _Recomputed | None:
    """Return the row of blocks whose recomputation leaves least; None if no row of two frees anything."""
    rows: dict[str, list[Sums]] = {}
    for sums in account.by_module(inner=True):
        if sums.path and sums.checkpoint:
            parent, _, name = sums.path.rpartition(".")
            if parent and name.isdigit():
                rows.setdefault(parent, []).append(sums)
    found = []
    for parent, blocks in rows.items():
        if len(blocks) > 1:
            kept = account.total.bytes - sum(block.checkpoint for block in blocks)
            most = max(block.checkpoint for block in blocks)
            found.append(_Recomputed(f"{parent}.*", max(kept, 0), most))
    return min(found, key=lambda each: each.kept + each.most, default=None)


def _limit(step: ExaminedStep, account: SavedTensors, beside: int) -> Result:
    """Return the batch that would be the first not to fit, by what two batches keep."""
    batch = step.samples
    device = next((p.device for p in step.parameters.values()), torch.device("cpu"))
    room = room_on(device)
    if batch is None:
        return Result(TRIAL, "untried", DID_LIMIT, "no input is known to hold a batch of samples")
    if room is None:
        return Result(
            TRIAL, "untried", DID_LIMIT, f"how much memory {device} has left is not known"
        )
    few, fewer = _sizes(batch)
    try:
        small = step.run.saved(_resized(step, batch, few))
        third = step.run.saved(_resized(step, batch, fewer))
    except Exception as error:  # noqa: BLE001 - the program's own code, with another batch
        return Result(
            TRIAL, "untried", DID_LIMIT, f"the model takes no other batch: {in_short(error)}"
        )

    line = _Line.through((few, small.total.bytes), (batch.count, account.total.bytes))
    off = abs(line.at(fewer) - third.total.bytes)
    if line.slope <= 0 or off > STRAIGHT * third.total.bytes:
        came = (
            f"{sized(third.total.bytes)} for {fewer}, {sized(small.total.bytes)} for {few} and "
            f"{sized(account.total.bytes)} for {counted(batch.count, 'sample')} are on no line"
        )
        return Result(TRIAL, "untried", DID_LIMIT, came)

    line = _Line(line.start, line.slope + beside / batch.count)
    trained = [p for p in step.parameters.values() if p.requires_grad]
    fixed = sum(p.numel() * p.element_size() for p in trained)
    if step.training is not None:
        fixed += step.training.state_bytes or 0
    first = int((room - fixed - line.start) // line.slope) + 1
    came = (
        f"{sized(round(line.slope))} a sample, and {sized(room)} free on {device.type}: beside "
        f"{sized(fixed)} for gradients and the optimizer, batches from about "
        f"{thousands(first)} samples on would not fit"
    )
    holder = _holder_at(account, small, few, batch.count, first)
    if holder is not None:
        came += f", and hold most in {holder or step.name}"
    numbers = {"bytes_per_sample": line.slope, "bytes_free": room, "first_too_large": first}
    return Result(TRIAL, "ok", DID_LIMIT, came, numbers=numbers)


@dataclass(frozen=True)
class _Line:
    """Bytes that grow with the samples of a batch.

    Attributes:
        start: Those without a sample.
        slope: Those of each sample.
    """

    start: float
    slope: float

    @classmethod
    def through(cls, one: tuple[int, int], other: tuple[int, int]) -> _Line:
        slope = (other[1] - one[1]) / (other[0] - one[0])
        return cls(one[1] - slope * one[0], slope)

    def at(self, samples: int) -> float:
        return self.start + self.slope * samples


def _sizes(batch: SampleDimension) -> tuple[int, int]:
    """Return two other sizes of a batch: a half and a quarter, or multiples of a small one."""
    if batch.count >= 8:
        return batch.count // 2, batch.count // 4
    return 2 * batch.count, 3 * batch.count


def _resized(step: ExaminedStep, batch: SampleDimension, size: int) -> ModelInputs:
    """Return the inputs with so many samples, which are repeated where there are too few."""
    new = {}
    for name, value in step.inputs.numbers().items():
        if batch.of(value):
            rows = torch.arange(size, device=value.device) % batch.count
            new[name] = value.detach().index_select(batch.dim, rows)
    return step.inputs.with_tensors(new)


def _holder_at(
    full: SavedTensors, part: SavedTensors, few: int, count: int, size: int
) -> str | None:
    """Return the module that would keep most in a batch of a size; None if no module keeps anything."""
    of_part = _by_path(part.by_module())
    lines = {
        path: _Line.through((few, of_part.get(path, 0)), (count, nbytes)).at(size)
        for path, nbytes in _by_path(full.by_module()).items()
    }
    return max(lines, key=lines.__getitem__, default=None)


def _by_path(rows: Sequence[Sums]) -> dict[str, int]:
    return {sums.path: sums.bytes for sums in rows if sums.path is not None}
