"""What the lines that lead to a backward pass take from the program: its batch, above all.

# Note [What lines take]
A step can run again later if its lines find the variables that they read. Of those with tensors or
plain values the values are kept; models, functions and whatever else is not plain are those that
the program makes again. Which of ever more statements will be run (see Note [The lines of a loss]
in `kedge.repro.step.program_lines`) is not known yet, but they have to begin before anything was
computed from parameters: a tensor with a graph cannot be kept. So the variables of the first such
statements are kept whatever they take, and those of larger ones if they are small: the lines that
draw a batch read the whole data set, which the program has again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from kedge.frames import SourceLine, frames_around
from kedge.repro.kept.plain_values import PlainValues, unpacked
from kedge.repro.step.program_lines import (
    StatementsAgain,
    passes_on,
    position_in,
    statements_before,
)
from kedge.sites import leaves
from kedge.torch_internals.source_lines import source_of

MOST_TRIES = 16
"""Most beginnings of the lines for which variables are kept, and which a replay tries."""
_SMALL = 16 * 2**20
"""Bytes of a variable up to which it is kept for larger statements, too."""
_DEEPEST = 60
"""Frames that are read; a backward pass in a trainer has some thirty around it."""

_VARIABLE = "variable."
"""What the names of the tensors of variables begin with: a function may be called loss."""

Place = tuple[tuple[CodeType, int], ...]


@dataclass(frozen=True)
class StepInputs:
    """The variables that the lines of a backward pass take.

    Attributes:
        line: The line that called backward.
        column: The column of the call in it, from 0; None if that is not known.
        names: Their values as JSON, by variable, for each function by its qualified name.
        tensors: The tensors of the JSON.
        left_out: What is not kept, though it is not the program's code: ``FUNCTION.VARIABLE``.
    """

    line: SourceLine
    names: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Tensor]
    left_out: Sequence[str]
    column: int | None = None

    def values_for(self, statements: StatementsAgain) -> dict[str, Any]:
        """Return the kept values of the variables that some statements take.

        A parameter that is a variable, or in one, receives its value, as the optimizer holds it.
        """
        kept = self.names.get(statements.function, {})
        values = {}
        for name in statements.taken & kept.keys():
            now = statements.names.get(name)
            value = unpacked(kept[name], self.tensors, now)
            own = dict(_tensors_in(now))
            trained = {}
            for at, tensor in leaves.find(value):
                if at in own and _is_parameter(own[at], tensor):
                    with torch.no_grad():
                        own[at].copy_(tensor)
                    trained[at] = own[at]
            values[name] = leaves.put(value, trained)
        return values


def line_below(frame: FrameType) -> FrameType | None:
    """Return the frame with the line that called backward: the innermost that is not Kedge's or PyTorch's."""
    return next((each for each in frames_around(frame) if not passes_on(each)), None)


class LinesTaken:
    """Finds what the lines of backward passes take; remembers which variables, as code does not change."""

    def __init__(self) -> None:
        self._known: dict[Place, list[tuple[str, frozenset[str]]]] = {}

    def inputs_of(self, frame: FrameType) -> StepInputs | None:
        """Return what the lines take that led to a backward pass; None if none of them can run again.

        Args:
            frame: A frame inside of the pass.
        """
        line = line_below(frame)
        if line is None:
            return None
        tries = self._tries(frame)
        frames = _frames_by_function(frame)
        values = PlainValues()
        names: dict[str, dict[str, Any]] = {}
        left_out: list[str] = []
        can_run = False
        for function, taken in tries:
            found = _variables(frames[function], taken)
            if any(_has_graph(value) for value in found.values()):
                continue
            kept = names.setdefault(function, {})
            for name, value in found.items():
                is_wanted = not can_run or _bytes_of(value) <= _SMALL
                if name in kept or not is_wanted or _is_code(value):
                    continue
                before = len(values.left_out)
                packed = values.packed(f"{_VARIABLE}{function}.{name}", value)
                if len(values.left_out) == before:
                    kept[name] = packed
                elif not can_run:
                    left_out.append(f"{function}.{name}")
            can_run = True
        if not can_run:
            return None
        _, column = position_in(line)
        return StepInputs(source_of(line), names, values.tensors, left_out, column)

    def _tries(self, frame: FrameType) -> list[tuple[str, frozenset[str]]]:
        """Return the function and the taken variables of each of ever more statements."""
        around = islice(frames_around(frame), _DEEPEST)
        place = tuple((each.f_code, each.f_lasti) for each in around if not passes_on(each))
        known = self._known.get(place)
        if known is None:
            tries = islice(statements_before(frame), MOST_TRIES)
            known = [(each.function, each.taken) for each in tries]
            self._known[place] = known
        return known


def _frames_by_function(frame: FrameType) -> dict[str, FrameType]:
    """Return the frames around a frame by the names of their functions; of several of one, the innermost."""
    found: dict[str, FrameType] = {}
    for each in islice(frames_around(frame), _DEEPEST):
        if not passes_on(each):
            found.setdefault(each.f_code.co_qualname, each)
    return found


def _variables(frame: FrameType, names: Iterable[str]) -> dict[str, Any]:
    """Return those variables of a frame that have these names, and a value."""
    own, module = frame.f_locals, frame.f_globals
    found = {}
    for name in names:
        if name in own:
            found[name] = own[name]
        elif name in module:
            found[name] = module[name]
    return found


def _has_graph(value: Any) -> bool:
    return any(tensor.grad_fn is not None for _, tensor in _tensors_in(value))


def _tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(value, nn.Module):
        yield from leaves.find(value)


def _bytes_of(value: Any) -> int:
    return sum(tensor.nbytes for _, tensor in _tensors_in(value))


def _is_parameter(now: Tensor, kept: Tensor) -> bool:
    """Whether a tensor is trained, and had the same shape in the kept step."""
    return now.requires_grad and now.is_leaf and kept.shape == now.shape


def _is_code(value: Any) -> bool:
    """Whether a value is the program's own: a module, a function, a class, a model, an optimizer."""
    own = nn.Module | torch.optim.Optimizer
    return callable(value) or isinstance(value, (own, type(torch)))
