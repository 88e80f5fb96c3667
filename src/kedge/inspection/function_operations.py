"""The operations that a program makes outside of modules, by function name and line, with statistics of their results.

# Note [Outside of modules]
A function mode sees every call of PyTorch on its thread. An operation counts if no module's call is
among the frames around it, nor an optimizer's step, nor a backward pass. So a program of tensors
alone has its operations here, and a module has its own in `kedge.inspection.operations`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from kedge import notebook
from kedge.frames import SourceLine, is_between
from kedge.hooks.operations.names import name_of
from kedge.short_text import compact
from kedge.sites import leaves
from kedge.torch_internals import modes
from kedge.torch_internals.accelerators import same_random_numbers, with_doubles
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.module_calls import CALLS
from kedge.torch_internals.source_lines import TORCH, source_of

_HEAD = ("operation", "calls", "in", "out", "mean", "rms", "min", "max", "nonfinite", "line", "")
_SHOWN = 4
_OPTIMIZERS = f"{TORCH}optim{os.sep}"


@dataclass
class FunctionOperation:
    """One operation of a program: a function that one line calls.

    Attributes:
        name: The function's name, with a number where several lines call it: ``matmul#1``.
        source: The line of the program.
        calls: How often it was called.
        inputs: Shapes of its input tensors at the first call, by their places among the arguments.
        outputs: Shapes of its results at the first call.
        count: The number of elements of all results of floating point numbers.
        nonfinite: How many of them are infinite or NaN; the other statistics leave these out.
        total: Their sum.
        squares: The sum of their squares.
        least: The smallest; infinite if there is none.
        largest: The largest; minus infinite if there is none.
    """

    name: str
    source: SourceLine | None
    calls: int = 0
    inputs: list[tuple[int, ...]] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    count: int = 0
    nonfinite: int = 0
    total: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    largest: float = -math.inf

    @property
    def mean(self) -> float:
        """The mean of all results; NaN without any."""
        return self.total / finite if (finite := self.count - self.nonfinite) else math.nan

    @property
    def rms(self) -> float:
        """The root mean square of all results; NaN without any."""
        return (
            math.sqrt(self.squares / finite)
            if (finite := self.count - self.nonfinite)
            else math.nan
        )

    def add(self, value: Tensor) -> None:
        """Add the statistics of a result."""
        if not value.is_floating_point() or not value.numel():
            return
        numbers = with_doubles(value.detach()).double()
        finite = numbers[numbers.isfinite()]
        self.count += numbers.numel()
        self.nonfinite += numbers.numel() - finite.numel()
        if finite.numel():
            low, high = (bound.item() for bound in finite.aminmax())
            self.total += finite.sum().item()
            self.squares += finite.square().sum().item()
            self.least, self.largest = min(self.least, low), max(self.largest, high)


class FunctionOperations(notebook.Printed):
    """The operations of a program outside of modules, in the order of their first calls: prints, counts and iterates them."""

    def __init__(self, rows: tuple[FunctionOperation, ...]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[FunctionOperation]:
        """The operations."""
        return iter(self.rows)

    def __len__(self) -> int:
        """The number of operations."""
        return len(self.rows)

    def __getitem__(self, name: str) -> FunctionOperation:
        """The operation of a name, such as ``"relu#1"``."""
        for row in self.rows:
            if name == row.name:
                return row
        raise KeyError(
            f'no operation is called "{name}"; there are {", ".join(r.name for r in self.rows[:_SHOWN])}, ...'
        )

    def __str__(self) -> str:
        """A table: operation, calls, shapes, statistics of the results, and the line."""
        if not self.rows:
            return "it makes no operation outside of modules"
        lines = [_HEAD, *map(_cells, self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
        left = {0, 2, 3, len(_HEAD) - 2, len(_HEAD) - 1}
        return "\n".join(
            "  ".join(
                c.ljust(w) if i in left else c.rjust(w)
                for i, (c, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def _repr_html_(self) -> str:
        return (
            notebook.table(_HEAD, map(_cells, self.rows), align="mrmmrrrrrmm")
            if self.rows
            else notebook.paragraph(str(self))
        )


def _cells(row: FunctionOperation) -> tuple[str, ...]:
    known = row.count > row.nonfinite
    figures = [
        compact(each) if known else "-" for each in (row.mean, row.rms, row.least, row.largest)
    ]
    line = (
        ("", "")
        if row.source is None
        else (f"{row.source.file}:{row.source.line}", row.source.text or "")
    )
    nonfinite = str(row.nonfinite) if row.count else "-"
    return (
        row.name,
        str(row.calls),
        _shapes(row.inputs),
        _shapes(row.outputs),
        *figures,
        nonfinite,
        *line,
    )


def _shapes(shapes: list[tuple[int, ...]]) -> str:
    return " ".join(str(list(shape)) for shape in shapes[:_SHOWN]) + (
        " ..." if len(shapes) > _SHOWN else ""
    )


class OutsideListing(TorchFunctionMode):
    """A listing of the operations of this thread outside of modules; see Note [Outside of modules].

    Args:
        after_backward: Called after each call of ``backward`` on a tensor.
    """

    def __init__(self, after_backward: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.after_backward = after_backward
        self._rows: dict[tuple[str, str, int], FunctionOperation] = {}
        self._up = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; list it if it is an operation."""
        result = func(*args, **(kwargs or {}))
        if self._up and not is_compiling():
            with (
                torch.no_grad(),
                modes.without_function_modes(),
            ):  # modes of the program see its own calls alone
                self._see(func, args, kwargs, result)
        return result

    def _see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if getattr(func, "__name__", "") == "backward" and self.after_backward is not None:
            self.after_backward()
        elif (name := name_of(func)) and (made := _made(name, args, result)) and not in_backward():
            frame = _line_outside(sys._getframe(1))
            if frame is not None:
                self._list(name, source_of(frame), (args, kwargs), made)

    def _list(self, name: str, source: SourceLine, given: Any, made: list[Tensor]) -> None:
        row = self._rows.setdefault(
            (name, source.file, source.line), FunctionOperation(name, source)
        )
        if not row.calls:
            row.inputs = [leaves.shape_of(tensor) for _, tensor in leaves.find(given)]
            row.outputs = [tuple(tensor.shape) for tensor in made]
        row.calls += 1
        for tensor in made:
            row.add(tensor)

    def start(self) -> Self:
        """Begin to list the operations of this thread."""
        modes.push_function_mode(self)
        self._up = True
        return self

    def stop(self) -> None:
        """Stop; the program's own modes above stay where they are."""
        if not self._up:
            return
        self._up = False
        above: list[Any] = []
        while modes.function_modes():
            top = modes.pop_function_mode()
            if top is self:
                break
            above.append(top)
        for other in reversed(above):
            modes.push_function_mode(other)

    def operations(self) -> FunctionOperations:
        """Return the operations listed so far."""
        rows, several = list(self._rows.values()), dict[str, list[FunctionOperation]]()
        for row in rows:
            several.setdefault(row.name.partition("#")[0], []).append(row)
        for name, group in several.items():
            for number, row in enumerate(group if len(group) > 1 else ()):
                row.name = f"{name}#{number}"
        return FunctionOperations(tuple(rows))


def _made(name: str, args: Any, result: Any) -> list[Tensor]:
    """Return the tensors that an operation made or changed, as far as their numbers can be read."""
    value = args[0] if name == "setitem" else result
    return [tensor for _, tensor in leaves.find(value) if _is_plain(tensor)]


def _is_plain(value: Tensor) -> bool:
    """Whether a tensor has numbers that can be read here."""
    plain = (
        type(value) in (Tensor, Parameter) and value.layout == torch.strided and not value.is_nested
    )
    return plain and modes.has_data(value) and not modes.is_transforming()


def _line_outside(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the program's line that makes an operation; None if it belongs to a module or an optimizer."""
    line = None
    while frame is not None:
        if id(frame.f_code) in CALLS or frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return None
        if line is None and not is_between(frame.f_code.co_filename):
            line = frame
        frame = frame.f_back
    return line


def list_function(function: Callable[..., Any], args: Any, kwargs: Any) -> FunctionOperations:
    """Run a function once and return its operations outside of modules; random numbers are as before."""
    listing = OutsideListing()
    with same_random_numbers():
        listing.start()
        try:
            function(*args, **kwargs)
        finally:
            listing.stop()
    return listing.operations()


untraced(OutsideListing.__torch_function__)
