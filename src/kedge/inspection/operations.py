"""The operations of a model's forwards: `operations`, a printable table."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kedge import notebook
from kedge.calls.arguments import called_as, not_a_model, noted_arguments
from kedge.errors import WrongCall
from kedge.flow import Act, Event
from kedge.frames import SourceLine, is_between
from kedge.hooks.operations.attention import is_inside
from kedge.hooks.operations.mode import OPERATE
from kedge.hooks.session import Session
from kedge.inspection.function_operations import list_function
from kedge.sites.site import Site
from kedge.torch_internals import dynamo
from kedge.torch_internals.accelerators import same_random_numbers
from kedge.torch_internals.module_calls import CALLS
from kedge.torch_internals.module_tables import modules_in, own_buffers
from kedge.torch_internals.source_lines import source_of

_SHOWN = 4
_HEAD = ("operation", "in", "out", "line", "")


@dataclass
class Operation:
    """One operation of one forward.

    Attributes:
        site: Its site: of the module's path, the call of the module, and the operation's name and
            index.
        inputs: Shapes of its input tensors, by their names among the arguments.
        outputs: Shapes of its output tensors, by their names; the name of a bare one is empty.
        source: The line of the forward that makes it.
    """

    site: Site
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    source: SourceLine | None = None


class Operations(notebook.Printed):
    """The operations that one forward of a model made, in their order.

    Prints, counts and iterates them.
    """

    def __init__(self, rows: tuple[Operation, ...]) -> None:
        self.rows = rows
        self._several: set[str] = set()
        self._numbered: set[tuple[str, str]] = set()
        for row in rows:
            site = row.site
            if site.call:
                self._several.add(site.path)
            if site.op is not None and site.op[1]:
                self._numbered.add((site.path, site.op[0]))

    def __iter__(self) -> Iterator[Operation]:
        """The operations."""
        return iter(self.rows)

    def __len__(self) -> int:
        """The number of operations."""
        return len(self.rows)

    def __getitem__(self, name: str) -> Operation:
        """The operation of a name, such as ``"layer1.0/relu#1"``."""
        for row in self.rows:
            if name in (self.name(row), str(row.site).removesuffix(":out")):
                return row
        names = ", ".join(map(self.name, self.rows[:_SHOWN]))
        raise KeyError(f'no operation is called "{name}"; there are {names}, ...')

    def name(self, row: Operation) -> str:
        """The shortest selector of an operation: calls and indices only where there are several."""
        site = row.site
        if site.path not in self._several:
            site = replace(site, call=None)
        if site.op is not None and (site.path, site.op[0]) not in self._numbered:
            site = replace(site, op=(site.op[0], None))
        return str(site).removesuffix(":out")

    def _cells(self) -> list[tuple[str, ...]]:
        cells: list[tuple[str, ...]] = []
        for row in self.rows:
            shapes = _shapes(row.inputs), _shapes(row.outputs)
            cells.append((self.name(row), *shapes, *_line(row.source)))
        return cells

    def __str__(self) -> str:
        """A table: operation, shapes in and out, and the line that makes it."""
        if not self.rows:
            return "its forward makes no visible operation"
        table = [_HEAD, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for row in table:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if not self.rows:
            return notebook.paragraph(str(self))
        return notebook.table(_HEAD, self._cells(), align="mmmmm")


def _shapes(shapes: dict[str, tuple[int, ...]]) -> str:
    shown = [str(list(shape)) for shape in shapes.values()]
    if len(shown) > _SHOWN:
        shown[_SHOWN:] = ["..."]
    return " ".join(shown)


def _line(source: SourceLine | None) -> tuple[str, str]:
    if source is None:
        return "", ""
    file = source.file.rpartition(f"site-packages{os.sep}")[2]
    return f"{file}:{source.line}", source.text or ""


class Listing:
    """A listing of the operations of forwards while they run."""

    observes = True

    def __init__(self) -> None:
        self.session = Session()
        self._rows: dict[tuple[int, Site], Operation] = {}

    def add(self, model: nn.Module, *, begun: bool = False) -> None:
        """Start listing the operations of a model.

        Args:
            model: The model.
            begun: Its first call has begun, and PyTorch is running its forward-pre hooks.
        """
        self.session.hook(model, "**/*:in, **/*:out", self)
        ops = self.session.targets[id(model)].ops
        if begun and ops is not None and id(model) in ops.switches:
            ops.switches[id(model)](model, (), {})

    def bind(self, site: Site) -> Act:
        """Return the action that lists the operations of one module."""

        def act(value: Tensor, event: Event) -> None:
            own = replace(event.site, kind="out", leaf=None, call=event.call)
            row = self._rows.setdefault((event.pass_, own), Operation(own))
            shapes = row.outputs if event.site.kind == "out" else row.inputs
            shapes[event.site.leaf or ""] = tuple(value.shape)
            row.source = row.source or _source()

        return act

    def operations(self) -> Operations:
        """Return the operations listed so far, for the first pass of each module."""
        rows: dict[Site, Operation] = {}
        for (_, site), row in self._rows.items():
            if row.outputs:
                rows.setdefault(site, row)
        return Operations(tuple(rows.values()))


def _source() -> SourceLine | None:
    """The program's line that makes the current operation.

    In a PyTorch module, it is the line of its forward.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame.f_code) != OPERATE:
        frame = frame.f_back
    last = None
    while frame is not None and id(frame.f_code) not in CALLS:
        if not is_between(frame.f_code.co_filename) or is_inside(frame):
            return source_of(frame)
        last = frame
        frame = frame.f_back
    if last is None:
        return None
    return source_of(last)


@overload
def operations(model: nn.Module, *args: Any, **kwargs: Any) -> Operations: ...


@overload
def operations(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...


@called_as("kedge.operations(model, images)")
def operations(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """List the operations in a forward, or in a function, with their shapes and source lines.

    The forward of a model runs once; the model, its buffers and the random state are as before. A
    compiled model runs uncompiled, because compiled code does not call operations one by one. A
    function also runs once; the result lists the operations that it calls outside of modules, with
    statistics of their results.

    Args:
        model: The model, or a function.
        args: The positional arguments of the forward or function.
        kwargs: Its keyword arguments.

    Returns:
        The operations, as a table that prints.

    Raises:
        WrongCall: If `model` is neither a module nor a function.

    Examples:
        >>> print(kedge.operations(torch.nn.functional.softplus, images)["softplus"].calls)
        1
    """
    if not isinstance(model, nn.Module):
        if not callable(model) or isinstance(model, type):
            raise WrongCall(
                "operations takes a torch.nn.Module or a function, then its arguments, "
                f"not {not_a_model(model)}"
            )
        return list_function(model, args, kwargs)

    inner = dynamo.unwrap(model)
    listing = Listing()
    listing.add(inner)
    try:
        with noted_arguments(model, args, kwargs), _unchanged(inner):
            inner(*args, **kwargs)
    finally:
        listing.session.end(quiet=True)
    return listing.operations()


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore buffers and random numbers after the block."""
    before: list[tuple[nn.Module, str, Tensor, Tensor]] = []
    for module in modules_in(model).values():
        for name, buffer in own_buffers(module).items():
            if buffer is not None and not is_lazy(buffer):
                before.append((module, name, buffer, buffer.detach().clone()))
    with same_random_numbers():
        try:
            yield
        finally:
            for module, name, own, value in before:
                if getattr(module, name, None) is not own:
                    setattr(module, name, own)
                if not torch.equal(own, value):  # a batch norm changes it without a new version
                    with torch.no_grad():
                        own.copy_(value)
