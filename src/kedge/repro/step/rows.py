"""Which rows of a batch make its loss so large: the step's lines run again with some of the rows alone.

# Note [Rows of a loss]
A loss over a batch is as a rule the mean, or the sum, of those of its rows. So the lines that
computed it run again with one half of the rows, then with the other; then the half with the larger
share is halved, and so on, as long as the shares are those of a mean or of a sum. Where they are
not, as behind a batch norm or with a loss of pairs, nothing is said. If the half of the lines that
calls the model can run again, the gradients of single rows are known, too.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from kedge.json_input.classes import as_json
from kedge.repro.step.copied_process import each_in_a_copy
from kedge.repro.step.program_lines import StatementsAgain, graph_of, statements_before
from kedge.sites import leaves
from kedge.store.events import RowsEvent, RowShare
from kedge.torch_internals.accelerators import cpu_generator_state, set_generator_states
from kedge.torch_internals.autograd_nodes import leaves_behind
from kedge.torch_internals.loaders import last_samples

_MOST_TRIES = 12
_MOST_ROWS = 3
"""Most rows that are named."""
_ENOUGH = 0.8
"""The share of the loss with which the named rows suffice."""
_LEAST = 0.2
"""The least share of a row that is named."""
_TOLERANCE = 0.02
"""By how much of the loss the shares of two halves may differ from that of both."""


def find_rows(frame: FrameType, losses: Sequence[Tensor]) -> bytes:
    """Try ever more of the program's statements until they show the rows; runs in a copy of the process.

    Args:
        frame: The frame that called backward.
        losses: What it began at.

    Returns:
        The event, as JSON, without its step and its loss; empty if nothing can be said.
    """

    def tries() -> Iterator[Any]:
        for has_model in (True, False):
            for statements in statements_before(frame):
                yield partial(_try, statements, losses, has_model=has_model)

    return each_in_a_copy(tries(), 2 * _MOST_TRIES)


def _try(statements: StatementsAgain, losses: Sequence[Tensor], *, has_model: bool) -> bytes:
    """Return what some statements show, or nothing."""
    batch = Batch.of(statements)
    if batch is None or len(losses) != 1 or losses[0].numel() != 1:
        return b""
    if has_model and batch.needs_gradient:
        return b""
    samples = last_samples(batch.length)
    state = cpu_generator_state()
    again = statements.run()
    whole = float(losses[0].detach())
    if again is None or graph_of(again.losses) != graph_of(losses):
        return b""
    if not math.isclose(_value(again.losses), whole, rel_tol=_TOLERANCE):
        return b""

    def loss_of(rows: Sequence[int]) -> Tensor | None:
        set_generator_states({"cpu": state})
        ran = statements.run(batch.only(rows))
        if ran is None or len(ran.losses) != 1:
            return None
        return ran.losses[0]

    shares = _shares_of(loss_of, batch.length, whole)
    if shares is None:
        return b""
    is_mean, found = shares
    named = []
    for row, share in found:
        gradient = sample = None
        if has_model:
            gradient = _gradient_share(loss_of, row, batch.length, is_mean=is_mean)
        if samples:
            sample = samples[row]
        named.append(RowShare(row=row, loss=share, gradient=gradient, sample=sample))
    event = RowsEvent(step=0, of=batch.length, rows=tuple(named))
    return json.dumps(as_json(event)).encode()


class Batch:
    """The values that statements take, and that have a row for each sample.

    Args:
        values: Those values, by the names of the program's variables.
        length: The number of rows.
    """

    def __init__(self, values: Mapping[str, Any], length: int) -> None:
        self.values = values
        self.length = length

    @classmethod
    def of(cls, statements: StatementsAgain) -> Batch | None:
        """Return the batch that statements take: of all first dimensions, the one that most of its tensors have."""
        taken = {name: statements.names.get(name) for name in statements.taken}
        lengths: Counter[int] = Counter()
        for value in taken.values():
            lengths.update({len(tensor) for _, tensor in _rows_in(value)})
        if not lengths:
            return None
        length, _ = max(lengths.items(), key=lambda each: (each[1], each[0]))
        values = {
            name: value
            for name, value in taken.items()
            if any(len(tensor) == length for _, tensor in _rows_in(value))
        }
        return cls(values, length)

    @property
    def needs_gradient(self) -> bool:
        """Whether it was computed from parameters: what did that has run already."""
        found = (tensor for value in self.values.values() for _, tensor in _rows_in(value))
        return any(tensor.requires_grad for tensor in found)

    def only(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the values with some rows alone."""
        places = torch.tensor(rows)
        changed = {}
        for name, value in self.values.items():
            new = {
                path: tensor.detach()[places]
                for path, tensor in _rows_in(value)
                if len(tensor) == self.length
            }
            changed[name] = leaves.put(value, new)
        return changed


def _rows_in(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors in a value that may have a row for each sample."""
    if isinstance(value, torch.nn.Module):
        return []
    return [
        (path, tensor)
        for path, tensor in leaves.find(value)
        if tensor.dim() and len(tensor) > 1 and not (tensor.requires_grad and tensor.is_leaf)
    ]


def _shares_of(
    loss_of: Any, length: int, whole: float
) -> tuple[bool, list[tuple[int, float]]] | None:
    """Return whether the loss is a mean, and the rows with the largest shares of it; None if it is neither mean nor sum."""
    is_mean = _is_mean(loss_of, length, whole)
    if is_mean is None:
        return None

    def share_of(rows: Sequence[int]) -> float | None:
        loss = loss_of(rows)
        if loss is None:
            return None
        weight = len(rows) / length if is_mean else 1.0
        return float(loss.detach()) * weight / whole

    found: list[tuple[int, float]] = []
    waiting: list[tuple[float, Sequence[int]]] = [(-1.0, range(length))]
    for _ in range(2 * _MOST_ROWS * length.bit_length()):
        if not waiting or len(found) == _MOST_ROWS:
            break
        negative, rows = heapq.heappop(waiting)
        if -negative < _LEAST:
            break
        if len(rows) == 1:
            found.append((rows[0], -negative))
            if sum(share for _, share in found) >= _ENOUGH:
                break
            continue
        halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        shares = [share_of(half) for half in halves]
        if None in shares or abs(sum(filter(None, shares)) + negative) > _TOLERANCE:
            return None
        for half, share in zip(halves, shares, strict=True):
            heapq.heappush(waiting, (-(share or 0.0), half))
    return is_mean, found


def _is_mean(loss_of: Any, length: int, whole: float) -> bool | None:
    """Return whether the losses of two halves have the loss as their mean; None if it is not their sum either."""
    half = length // 2
    parts = loss_of(range(half)), loss_of(range(half, length))
    if None in parts:
        return None
    first, second = (float(part.detach()) for part in parts)
    if math.isclose((first * half + second * (length - half)) / length, whole, rel_tol=_TOLERANCE):
        return True
    if math.isclose(first + second, whole, rel_tol=_TOLERANCE):
        return False
    return None


def _gradient_share(loss_of: Any, row: int, length: int, *, is_mean: bool) -> float | None:
    """Return the norm of a row's part of the gradient, as a share of that of the whole."""
    norms = []
    for rows in ([row], range(length)):
        loss = loss_of(rows)
        if loss is None or loss.grad_fn is None:
            return None
        norms.append(_gradient_norm(loss))
    own, whole = norms
    if is_mean:
        own /= length
    if not whole > 0:
        return None
    return own / whole


def _gradient_norm(loss: Tensor) -> float:
    params = leaves_behind([loss], ())
    gradients = torch.autograd.grad(loss, params, allow_unused=True)
    squares = [float(each.double().square().sum()) for each in gradients if each is not None]
    return math.sqrt(sum(squares))


def _value(losses: Sequence[Tensor]) -> float:
    if len(losses) != 1:
        return math.nan
    return float(losses[0].detach())
