"""What each module of a model takes in one call: parameters, multiply-adds, memory for backward, time.

# Note [Three kinds of calls]
Counting operations and recording saved tensors makes a call slower, so each has a call of its own,
and the time is that of further calls, in which a hook at the beginning and at the end of each
module reads a clock. All of them begin alike: with the same random numbers, the same attributes of
the modules, and copies of the arguments. All figures of a module include the modules inside it. A
module that is called several times has the sums of its calls, and the shapes of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kedge import notebook
from kedge.errors import WrongCall
from kedge.examination.model_inputs import ModelInputs
from kedge.hooks.placing.call_brackets import bracket
from kedge.hooks.placing.module_calls import OpenCalls
from kedge.offload.plan.timing import TimingClock, clock_of
from kedge.offload.recompute import past
from kedge.offload.recompute.state import StateToPutBack
from kedge.offload.saved_tensors import saved
from kedge.short_text import sized, thousands
from kedge.sites import leaves
from kedge.sites.folding import Fold, Folding
from kedge.sites.select import ModelLayout, runs
from kedge.torch_internals import dynamo
from kedge.torch_internals.module_tables import parameters_in
from kedge.torch_internals.random_numbers import RandomNumbers
from kedge.torch_internals.torchscript import class_name, takes_hooks

_TIMED = 5
"""The calls that are timed; the median counts."""
_HEAD = ("path", "type", "parameters", "output", "multiply-adds", "saved", "forward")
_ALIGN = "mmrmrrr"


@dataclass(frozen=True)
class ModuleCost:
    """What one module takes in one call of the model, with all modules inside it.

    Attributes:
        path: Its first name; empty for the model itself.
        type: The name of its class.
        calls: How often it was called.
        parameters: The numbers in its parameters, each parameter once.
        trainable: Those in parameters that require a gradient.
        outputs: The shapes of the tensors that its first call returned.
        multiply_adds: Multiplications with an addition, of the operations that PyTorch's
            `torch.utils.flop_counter` knows: products of matrices, convolutions, attention.
        saved: Bytes that autograd keeps for backward, each storage once, without parameters and
            buffers.
        forward: Seconds of its forward, the median of some calls; on a device, in the device's time.
    """

    path: str
    type: str
    calls: int
    parameters: int
    trainable: int
    outputs: tuple[tuple[int, ...], ...]
    multiply_adds: int
    saved: int
    forward: float


class ModelCosts(notebook.Printed):
    """What each called module of a model takes; prints as a table, the model itself in the first row.

    Blocks that are alike share a line in a long table; their time is the mean of theirs.
    """

    def __init__(self, rows: tuple[ModuleCost, ...]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[ModuleCost]:
        """The rows."""
        return iter(self.rows)

    def __len__(self) -> int:
        """The number of modules."""
        return len(self.rows)

    def __getitem__(self, path: str) -> ModuleCost:
        """The row of a path; that of the model itself is ``""``."""
        for row in self.rows:
            if row.path == path:
                return row
        raise KeyError(f'no module that was called is named "{path}"')

    def __str__(self) -> str:
        """The table."""
        return self._table(folded=True).text()

    def table(self, *, folded: bool = True) -> str:
        """Return the table as text.

        Args:
            folded: Whether blocks that are alike share their lines in a long table.
        """
        return self._table(folded=folded).text()

    def _repr_html_(self) -> str:
        return self._table(folded=True).html()

    def _table(self, *, folded: bool) -> notebook.Table:
        folds = _FOLDING.shown(self.rows) if folded else _FOLDING.each(self.rows)
        cells = [_cells(fold) for fold in folds]
        return notebook.Table(_HEAD, cells, _ALIGN, self._note())

    def _note(self) -> str:
        whole = self.rows[0]
        frozen = whole.parameters - whole.trainable
        parts = [f"{whole.parameters:,} parameters"]
        if frozen:
            parts.append(f"{frozen:,} of them frozen")
        parts.append(f"{thousands(whole.multiply_adds)} multiply-adds")
        parts.append(f"{sized(whole.saved)} saved for backward")
        parts.append(f"forward {_time(whole.forward)}")
        return f"total: {', '.join(parts)}"


_FOLDING = Folding[ModuleCost](
    lambda row: row.path,
    lambda row: (
        row.type,
        row.calls,
        row.parameters,
        row.trainable,
        row.outputs,
        row.multiply_adds,
        row.saved,
    ),
)


def _cells(fold: Fold[ModuleCost]) -> tuple[str, ...]:
    row = fold.members[0]
    kind = row.type
    if row.calls > 1:
        kind += f" ({row.calls} calls)"
    return (
        fold.name or '""',
        kind,
        thousands(row.parameters) if row.parameters else "",
        " ".join(str(list(shape)) for shape in row.outputs),
        thousands(row.multiply_adds) if row.multiply_adds else "",
        sized(row.saved) if row.saved else "",
        _time(mean(each.forward for each in fold.members)),
    )


def _time(duration: float) -> str:
    return f"{duration * 1e3:.3g} ms"


@dataclass
class _Seen:
    """What the calls of one module have shown."""

    calls: int = 0
    outputs: tuple[tuple[int, ...], ...] = ()
    operations: int = 0


def costs_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCosts:
    """Measure a model in some calls with the same arguments; see Note [Three kinds of calls].

    The calls are made with gradients on. Random numbers, buffers and the attributes of modules are
    put back.

    Args:
        model: The model.
        args: Its arguments by position.
        kwargs: Those by name.

    Raises:
        WrongCall: The model is in TorchScript.
    """
    model = dynamo.unwrap(model)
    if not takes_hooks(model):
        raise WrongCall(
            "kedge.sites(model, x): this model is in TorchScript, which runs it without Python and "
            "so without hooks; give the model that torch.jit.script or torch.jit.trace took"
        )
    layout = ModelLayout(model)
    modules = {
        path: module
        for path, module in layout.modules.items()
        if layout.first[id(module)] == path and runs(module) and takes_hooks(module)
    }

    inputs = ModelInputs.of_call(model, args, kwargs)
    state = StateToPutBack(model)
    numbers = RandomNumbers()
    notes = past.PastNotes(objects=past.EVERY_DEPTH, held=True)
    objects = [notes.note(each) for each in (*args, *kwargs.values())]  # such as a cache of keys

    def call(target: Callable[..., Any] = model) -> Any:
        given = inputs.apart()
        try:
            return target(*given.args, **given.kwargs)
        finally:
            numbers.restore()
            state.put_back()
            for noted in objects:
                past.put_back(noted, None)

    kept = {sums.path: sums.bytes for sums in call(saved(model)).by_module(inner=True)}
    with torch.inference_mode(mode=False), torch.enable_grad():
        seen = _counted(call, modules)
        times = _timed(call, modules, clock_of(_device_of(model)))

    rows = []
    for path, module in modules.items():
        if path not in seen:  # it was not called
            continue
        sizes = [(param.numel(), param.requires_grad) for param in parameters_in(module).values()]
        row = ModuleCost(
            path=path,
            type=class_name(module),
            calls=seen[path].calls,
            parameters=sum(size for size, _ in sizes),
            trainable=sum(size for size, trained in sizes if trained),
            outputs=seen[path].outputs,
            multiply_adds=seen[path].operations // 2,
            saved=kept.get(path, 0),
            forward=times.get(path, 0.0),  # not all models are alike in each call
        )
        rows.append(row)
    return ModelCosts(tuple(rows))


def _device_of(model: nn.Module) -> torch.device:
    param = next(iter(parameters_in(model).values()), None)
    return torch.device("cpu") if param is None else param.device


def _counted(call: Callable[[], Any], modules: dict[str, nn.Module]) -> dict[str, _Seen]:
    """Make a call; returns the calls, shapes and floating-point operations of each module."""
    counter = FlopCounterMode(display=False)
    seen: dict[str, _Seen] = {}

    def ended(path: str, before: int, output: Any) -> None:
        module = seen.setdefault(path, _Seen())
        module.calls += 1
        module.operations += counter.get_total_flops() - before
        if module.calls == 1:
            module.outputs = tuple(tuple(value.shape) for _, value in leaves.find(output))

    with ExitStack() as stack:
        _follow(stack, modules, counter.get_total_flops, ended)
        stack.enter_context(counter)
        call()
    return seen


def _timed(
    call: Callable[[], Any], modules: dict[str, nn.Module], clock: TimingClock
) -> dict[str, float]:
    """Make some calls; returns the seconds of each module."""
    spans: list[tuple[str, Any, Any]] = []
    times: dict[str, list[float]] = {}

    def ended(path: str, begun: Any, _output: Any) -> None:
        spans.append((path, begun, clock.mark()))

    with ExitStack() as stack:
        _follow(stack, modules, clock.mark, ended)
        for _ in range(_TIMED):
            spans.clear()
            call()
            sums: dict[str, float] = {}
            for path, begun, end in spans:
                sums[path] = sums.get(path, 0.0) + clock.between(begun, end)
            for path, seconds in sums.items():
                times.setdefault(path, []).append(seconds)
    return {path: median(found) for path, found in times.items()}


def _follow(
    stack: ExitStack,
    modules: dict[str, nn.Module],
    begins: Callable[[], Any],
    ended: Callable[[str, Any, Any], None],
) -> None:
    """Follow the calls of modules until a stack closes.

    Args:
        stack: The stack.
        modules: The modules, by their paths.
        begins: Returns the note on a call that begins.
        ended: Called with the path, the note and the output of a call that has ended.
    """
    calls: OpenCalls[Any] = OpenCalls()
    paths = {id(module): path for path, module in modules.items()}

    def begin(module: nn.Module, _args: Any, _kwargs: Any) -> None:
        calls.begin(module, begins())

    def end(module: nn.Module, output: Any) -> None:
        note = calls.end(module)
        ended(paths[id(module)], note, output)

    for module in modules.values():
        bracket(stack, module, begin, end)
