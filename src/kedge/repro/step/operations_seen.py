"""The operations of one step with the digests of their values, seen while the program runs.

# Note [The operations of a step]
A function mode sees every call of PyTorch on its thread. It lies below all modes of the program, so
that those can come and go above it. Of an operation in place the inputs are read before it runs. Left
out are the operations of optimizers and of a backward pass, where a checkpoint repeats a forward.
The inputs and outputs of each module's call stand between the operations, and so does what a
backward pass begins at: these are the values that a recording has.
"""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from kedge.compare.operations.seen import Event, SeenOperation, SeenValue
from kedge.frames import frames_around, is_between
from kedge.hooks.operations.names import name_of, overwrites
from kedge.hooks.placing.module_calls import CallTracker, OpenCalls, given_to, is_repeated
from kedge.repro.step.first_operations import ENTERING, CalledAt, called_at
from kedge.sites import leaves
from kedge.stderr import Shield
from kedge.torch_internals import modes
from kedge.torch_internals.accelerators import generator_states
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.own_work import own_work, programs_work
from kedge.torch_internals.source_lines import TORCH, line_of
from kedge.torch_internals.tensors import version_of
from kedge.verify.digests import digest

MOST_OPERATIONS = 100_000
"""Most operations of a step that are kept."""
_LONGEST = 60
_OPTIMIZERS = f"{TORCH}optim{os.sep}"
_LARGE = 1 << 20
"""Bytes from which on the digest of a tensor is kept as long as the tensor is unchanged."""


class OperationsSeen(TorchFunctionMode):
    """Sees the operations of the thread that begins it; see Note [The operations of a step].

    Args:
        failed: Called with the text of a failure; then nothing more is seen.
    """

    def __init__(self, failed: Callable[[str], None]) -> None:
        super().__init__()
        self._found: list[tuple[nn.Module | None, SeenOperation]] = []
        self._digests = _Digests()
        self._shield = Shield("seeing the operations", "no operation is compared", tell=failed)
        self._failed = failed
        self._sees = False
        self._calls: CallTracker[None, nn.Module] = CallTracker(
            self._entered, self._left, skip=is_repeated, shield=self._shield
        )

    def begin(self) -> None:
        """See the operations of this thread from now on."""
        with programs_work():
            above = [modes.pop_function_mode() for _ in range(modes.function_modes())]
            modes.push_function_mode(self)
            for mode in reversed(above):
                modes.push_function_mode(mode)
        self._calls.follow_all(None)
        self._sees = True

    def end(self) -> None:
        """See nothing more."""
        self._sees = False
        with programs_work():
            modes.take_off(self)
        self._calls.close()

    def seen(self, label: Callable[[nn.Module | None], str]) -> Iterator[SeenOperation]:
        """Yield what was seen.

        Args:
            label: Returns the recorded path of a module.
        """
        for module, operation in self._found:
            yield replace(operation, module=label(module))

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function; note it if it is an operation."""
        named = dict(kwargs or {})
        if not self._sees or is_compiling() or in_backward():
            return func(*args, **named)
        if getattr(func, "__name__", "") == "backward":
            self._note_boundary("backward", None, args[:1])
            return func(*args, **named)
        name = name_of(func)
        at = called_at(name) if name else None
        if at is None or _is_of_optimizer():
            return func(*args, **named)

        with torch.no_grad(), own_work():
            before = self._shield(self._before, args, named)
        result = func(*args, **named)
        if before is not None:
            with torch.no_grad(), own_work():
                self._shield(self._note, func, name, at, before, args, named, result)
        return result

    def _before(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Before:
        tensors = [*leaves.find(tuple(args)), *leaves.find(dict(kwargs))]
        return _Before(self._values(tensors), generator_states())

    def _note(
        self,
        func: Any,
        name: str,
        at: CalledAt,
        before: _Before,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        made = leaves.find(result)
        for place, tensor in overwrites(name, tuple(args), kwargs):
            if all(tensor is not each for _, each in made):
                made.append((place, tensor))
        if not made:
            return
        self._keep(
            at.module,
            SeenOperation(
                "operation",
                name,
                "",
                *_line_of(at),
                inputs=before.given,
                arguments=_arguments(func, args, kwargs),
                outputs=self._values(made),
                random=before.drawn(),
                enters=name in ENTERING,
            ),
        )

    # -- modules and backward passes --------------------------------------------------------

    def _entered(
        self, calls: OpenCalls[nn.Module], subject: None, module: nn.Module, given: Any
    ) -> nn.Module | None:
        if not self._sees:
            return None
        self._note_boundary("in", module, given_to(module) or given)
        return module

    def _left(self, calls: OpenCalls[nn.Module], module: nn.Module, output: Any) -> None:
        if self._sees:
            self._note_boundary("out", module, output)

    def _note_boundary(self, event: Event, module: nn.Module | None, value: Any) -> None:
        with torch.no_grad(), own_work():
            values = self._shield(self._values, leaves.find(value))
        if values is not None:
            line = _line_of(called_at(""))
            self._keep(module, SeenOperation(event, "", "", *line, inputs=values))

    # -- keeping ----------------------------------------------------------------------------

    def _keep(self, module: nn.Module | None, operation: SeenOperation) -> None:
        if len(self._found) >= MOST_OPERATIONS:
            self._sees = False
            self._failed(f"the step has more than {MOST_OPERATIONS:,} operations")
            return
        self._found.append((module, operation))

    def _values(self, tensors: Sequence[tuple[str, Tensor]]) -> tuple[SeenValue, ...]:
        found = []
        for name, tensor in tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape = tuple(leaves.shape_of(tensor))
            made = self._digests.of(tensor)
            found.append(SeenValue(name, dtype, shape, made, _node_of(tensor)))
        return tuple(found)


@dataclass(frozen=True)
class _Before:
    """What an operation gets: its tensors, and the states of the random generators."""

    given: tuple[SeenValue, ...]
    states: Mapping[str, Tensor]

    def drawn(self) -> str:
        """Return the digest of the states, if a generator has moved on since; empty otherwise."""
        after = generator_states()
        if all(torch.equal(state, after[place]) for place, state in self.states.items()):
            return ""
        return "".join(map(digest, self.states.values()))


class _Digests:
    """Digests of tensors; that of a large one is computed again only after a change in place."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, str]] = {}

    def of(self, tensor: Tensor) -> str:
        """Return the digest of a tensor."""
        if tensor.numel() * tensor.element_size() < _LARGE:
            return digest(tensor)
        version = version_of(tensor)
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version >= 0:
            return known[2]
        made = digest(tensor)
        self._known[id(tensor)] = weakref.ref(tensor), version, made
        return made


def _node_of(tensor: Tensor) -> str:
    if tensor.grad_fn is not None:
        return tensor.grad_fn.name()
    if tensor.requires_grad:
        return "leaf"
    return ""


def _is_of_optimizer() -> bool:
    """Whether an optimizer's step, and not the program, makes an operation."""
    for frame in frames_around(sys._getframe(2)):
        file = frame.f_code.co_filename
        if file.startswith(_OPTIMIZERS):
            return True
        if not is_between(file):
            return False
    return False


def _line_of(at: CalledAt) -> tuple[str, int, str]:
    """Return file, line and text of a call."""
    if at.code is None:
        return "", 0, ""
    source = line_of(at.code, at.line)
    return source.file, source.line, source.text or ""


# -- arguments that are no tensors ----------------------------------------------------------


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments that hold no tensor, as text; one by position has its name if it is known."""
    names = _names_of(func)
    found: dict[str, str] = {}
    for place, value in enumerate(args):
        if not isinstance(value, Tensor):
            name = names[place] if place < len(names) else str(place)
            found[name] = _told(value)
    for name, value in kwargs.items():
        if not isinstance(value, Tensor):
            found[name] = _told(value)
    return found


@lru_cache(maxsize=1024)
def _names_of(func: Any) -> tuple[str, ...]:
    """Return the names of a function's arguments by position; none of a function written in C."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return ()
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(each.name for each in parameters if each.kind in by_place)


def _told(value: Any) -> str:
    """Return an argument as text that is the same in every run of the program."""
    if isinstance(value, Tensor):
        return "..."
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return ":".join("" if part is None else _told(part) for part in parts)
    if isinstance(value, tuple | list):
        inner = ", ".join(map(_told, value))
        text = f"[{inner}]" if isinstance(value, list) else f"({inner})"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {_told(each)}" for key, each in value.items()) + "}"
    elif value is None or isinstance(value, _PLAIN):
        text = repr(value)
    else:
        text = type(value).__name__
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + "..."
    return text


_PLAIN = (
    bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip

untraced(OperationsSeen.__torch_function__)
