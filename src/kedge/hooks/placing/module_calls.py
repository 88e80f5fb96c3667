"""Which call of which module is the innermost, and what the calls were given."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from kedge.hooks.placing.concealed import Own
from kedge.sites import leaves
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.module_calls import CALL

Span = tuple[str | None, int]
OUTSIDE: Span = (None, 0)


def _at_once(work: Callable[..., None], *args: Any) -> None:
    work(*args)


def given_to(module: nn.Module) -> Any:
    """Return what the call of a module that is under way was given; nothing if there is no such call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CALL and frame.f_locals["self"] is module:
            return frame.f_locals["args"], frame.f_locals["kwargs"]
        frame = frame.f_back
    return ()


def running() -> list[nn.Module]:
    """The modules that are being called on this thread, the outermost first."""
    found: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found[::-1]


class Spans:
    """Hooks on models that follow the calls of their modules, in every thread.

    Args:
        number: Gives the storages of a tensor numbers that none else has.
        spare: Calls what a hook is to do; a watch has it do no harm.

    Attributes:
        given: What the calls of a module were given, over all calls: the numbers by the module's path.
        entered: What was given to the outermost modules and is no result of an earlier one.
    """

    def __init__(self, number: Callable[[Tensor], Iterable[int]], spare: Callable[..., None] = _at_once) -> None:
        self.number, self.spare = number, spare
        self.given: dict[str, set[int]] = {}
        self.entered: set[int] = set()
        self._here = threading.local()
        self._handles: list[Any] = []

    @property
    def innermost(self) -> Span:
        """The path and the call of the module that runs; the call is counted within one call of the outermost."""
        open_calls = getattr(self._here, "open", None)
        return open_calls[-1] if open_calls else OUTSIDE

    @property
    def around(self) -> Span:
        """The path and the call of the module that has called the innermost."""
        open_calls: list[Span] = getattr(self._here, "open", [])
        return open_calls[-2] if len(open_calls) > 1 else OUTSIDE

    @property
    def under_way(self) -> tuple[Span, ...]:
        """The calls that are under way in this thread, the outermost first."""
        return tuple(getattr(self._here, "open", ()))

    def add(self, model: nn.Module, paths: Iterable[str], label: Callable[[str], str]) -> None:
        """Follow some modules of a model from their next call on.

        Args:
            model: The model.
            paths: Which of its modules.
            label: Makes what a module is called of its path.
        """
        for path in paths:
            module = model.get_submodule(path)
            self._handles.append(
                module.register_forward_pre_hook(Enter(self, label(path)), prepend=True, with_kwargs=True)
            )
            self._handles.append(module.register_forward_hook(Leave(self, label(path)), always_call=True))

    def begin(self, path: str, given: Any) -> None:
        """Note that the call of a module begins, and what it was given."""
        here = self._here
        if not getattr(here, "open", None):
            here.open, here.calls = [], Counter()
        tensors = [tensor for _, tensor in leaves.find(given)]
        self.given.setdefault(path, set()).update(n for tensor in tensors for n in self.number(tensor))
        if not here.open and not in_backward():  # a checkpoint's recompute is nobody's beginning
            self.entered.update(n for tensor in tensors if tensor.grad_fn is None for n in self.number(tensor))
        here.open.append((path, here.calls[path]))
        here.calls[path] += 1

    def end(self, path: str) -> None:
        """Note that it ends; calls inside it that never ended, because they were left by an exception, end with it."""
        open_calls = getattr(self._here, "open", [])
        if any(each == path for each, _ in open_calls):
            while open_calls.pop()[0] != path:
                pass

    def close(self) -> None:
        """Take the hooks down."""
        while self._handles:
            self._handles.pop().remove()


class Enter(Own):
    """The hook before a module."""

    def __init__(self, spans: Spans, path: str) -> None:
        self.spans, self.path = spans, path

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Be a forward-pre hook."""
        if not torch.compiler.is_compiling():
            self.spans.spare(self.spans.begin, self.path, (args, kwargs))


class Leave(Own):
    """The hook behind a module."""

    def __init__(self, spans: Spans, path: str) -> None:
        self.spans, self.path = spans, path

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Be a forward hook."""
        if not torch.compiler.is_compiling():
            self.spans.spare(self.spans.end, self.path)


untraced(Enter.__call__, Leave.__call__)
