"""The operations that a program makes outside of modules, with statistics of their results.

They are listed by function name and line.

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
from kedge.hooks.operations.names import WRITING, name_of, written_into
from kedge.short_text import compact
from kedge.sites import leaves
from kedge.torch_internals import modes
from kedge.torch_internals.accelerators import same_random_numbers, with_doubles
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.module_calls import CALLS
from kedge.torch_internals.source_lines import TORCH, source_of

_HEAD = ("operation", "calls", "in", "out", "mean", "rms", "min", "max", "nonfinite", "line", "")
_ALIGN = "mrmmrrrrrmm"
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
    def finite(self) -> int:
        """The number of finite elements of all results."""
        return self.count - self.nonfinite

    @property
    def mean(self) -> float:
        """The mean of all results; NaN without any."""
        if not self.finite:
            return math.nan
        return self.total / self.finite

    @property
    def rms(self) -> float:
        """The root mean square of all results; NaN without any."""
        if not self.finite:
            return math.nan
        return math.sqrt(self.squares / self.finite)

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
            self.least = min(self.least, low)
            self.largest = max(self.largest, high)


class FunctionOperations(notebook.Printed):
    """The operations of a program outside of modules, in the order of their first calls.

    Prints, counts and iterates them.
    """

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
        names = ", ".join(row.name for row in self.rows[:_SHOWN])
        raise KeyError(f'no operation is called "{name}"; there are {names}, ...')

    def __str__(self) -> str:
        """A table: operation, calls, shapes, statistics of the results, and the line."""
        if not self.rows:
            return "it makes no operation outside of modules"
        table = [_HEAD, *map(_cells, self.rows)]
        columns = []
        for align, column in zip(_ALIGN, zip(*table, strict=True), strict=True):
            width = max(map(len, column))
            if align == "r":
                columns.append([cell.rjust(width) for cell in column])
            else:
                columns.append([cell.ljust(width) for cell in column])
        lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if not self.rows:
            return notebook.paragraph(str(self))
        return notebook.table(_HEAD, map(_cells, self.rows), align=_ALIGN)


def _cells(row: FunctionOperation) -> tuple[str, ...]:
    figures = ["-", "-", "-", "-"]
    if row.finite:
        figures = [compact(each) for each in (row.mean, row.rms, row.least, row.largest)]
    figures.append(str(row.nonfinite) if row.count else "-")

    line = ""
    text = ""
    if row.source is not None:
        line = f"{row.source.file}:{row.source.line}"
        text = row.source.text or ""
    shapes = (_shapes(row.inputs), _shapes(row.outputs))
    return (row.name, str(row.calls), *shapes, *figures, line, text)


def _shapes(shapes: list[tuple[int, ...]]) -> str:
    shown = [str(list(shape)) for shape in shapes[:_SHOWN]]
    if len(shapes) > _SHOWN:
        shown.append("...")
    return " ".join(shown)


@dataclass(frozen=True, slots=True)
class OutsideOperation:
    """One operation that has just run outside of modules.

    Attributes:
        name: The function's name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        made: The tensors that it made or changed, as far as their numbers can be read.
        frame: The frame of the program's line.
        begun: What `OutsideObserver.begins` returned before it ran.
    """

    name: str
    args: Any
    kwargs: Any
    made: list[Tensor]
    frame: FrameType
    begun: Any


class OutsideObserver(TorchFunctionMode):
    """A mode that sees the operations of this thread outside of modules; see Note [Outside of modules]."""

    def __init__(self) -> None:
        super().__init__()
        self._up = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; note it if it is an operation."""
        if not self._up or is_compiling():
            return func(*args, **(kwargs or {}))
        # Modes of the program see its own calls alone.
        with torch.no_grad(), modes.without_function_modes():
            begun = self.begins(args, kwargs)
        result = func(*args, **(kwargs or {}))
        if self._up:
            with torch.no_grad(), modes.without_function_modes():
                self._see(func, args, kwargs, result, begun)
        return result

    def _see(self, func: Any, args: Any, kwargs: Any, result: Any, begun: Any) -> None:
        if getattr(func, "__name__", "") == "backward":
            self.backward_ended()
            return
        name = name_of(func)
        if not name:
            return
        made = _made(func, name, args, kwargs or {}, result)
        if not made or in_backward():
            return
        frame = line_outside(sys._getframe(1))
        if frame is not None:
            self.made(OutsideOperation(name, args, kwargs, made, frame, begun))

    def begins(self, args: Any, kwargs: Any) -> Any:
        """Called before each function; returns what `made` is to know of that moment."""

    def made(self, operation: OutsideOperation) -> None:
        """Called after each operation."""

    def backward_ended(self) -> None:
        """Called after each call of ``backward`` on a tensor."""

    def start(self) -> Self:
        """Begin to see the operations of this thread."""
        modes.push_function_mode(self)
        self._up = True
        return self

    def stop(self) -> None:
        """Stop; the program's own modes above stay where they are."""
        if self._up:
            self._up = False
            modes.take_off(self)


class OutsideListing(OutsideObserver):
    """A listing of the operations of this thread outside of modules.

    Args:
        after_backward: Called after each call of ``backward`` on a tensor.
    """

    def __init__(self, after_backward: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.after_backward = after_backward
        self._rows: dict[tuple[str, str, int], FunctionOperation] = {}

    def backward_ended(self) -> None:
        """Called after each call of ``backward`` on a tensor."""
        if self.after_backward is not None:
            self.after_backward()

    def made(self, operation: OutsideOperation) -> None:
        """List an operation."""
        source = source_of(operation.frame)
        place = operation.name, source.file, source.line
        row = self._rows.setdefault(place, FunctionOperation(operation.name, source))
        if not row.calls:
            given = leaves.find((operation.args, operation.kwargs))
            row.inputs = [leaves.shape_of(tensor) for _, tensor in given]
            row.outputs = [tuple(tensor.shape) for tensor in operation.made]
        row.calls += 1
        for tensor in operation.made:
            row.add(tensor)

    def operations(self) -> FunctionOperations:
        """Return the operations listed so far."""
        rows = tuple(self._rows.values())
        named: dict[str, list[FunctionOperation]] = {}
        for row in rows:
            name, _, _ = row.name.partition("#")
            named.setdefault(name, []).append(row)

        for name, group in named.items():
            if len(group) > 1:
                for number, row in enumerate(group):
                    row.name = f"{name}#{number}"
        return FunctionOperations(rows)


def _made(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> list[Tensor]:
    """Return the tensors that an operation made or changed, as far as their numbers can be read."""
    value = result
    if result is None and name in WRITING:
        _, value = written_into(func, name, args, kwargs)
    return [tensor for _, tensor in leaves.find(value) if _is_plain(tensor)]


def _is_plain(value: Tensor) -> bool:
    """Whether a tensor has numbers that can be read here."""
    if type(value) not in (Tensor, Parameter):
        return False
    if value.layout != torch.strided or value.is_nested:
        return False
    return modes.has_data(value) and not modes.is_transforming()


def line_outside(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the program's line that makes an operation.

    Returns:
        None if the operation belongs to a module or an optimizer.
    """
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


untraced(OutsideObserver.__torch_function__)
