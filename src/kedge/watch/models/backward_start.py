"""The start of the active backward pass: its tensors, and the line of the program that began it.

# Note [What backward began at]
Nothing is patched. When a hook on a parameter runs, the active frame of `torch.autograd.backward`
holds the differentiated tensors, and the frames above it lead to the program's line. See Note
[Hooks on parameters] in `kedge.watch.models.backwards`.
"""

from __future__ import annotations

import sys
import threading
from cmath import isfinite
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from kedge.frames import frames_around, frames_of_threads, is_between, is_installed
from kedge.sites.operation_names import plain_name
from kedge.torch_internals import modes
from kedge.torch_internals.graph_task import graph_task

_PIPELINES = "torch.distributed.pipelining."
_NEAR = 4
"""Most frames between a thread that waits for a device and its `torch.autograd.backward`."""


@dataclass(frozen=True)
class BackwardStart:
    """The start of a backward pass.

    Attributes:
        tensors: The differentiated tensors.
        where: The code and line that called backward; None if no frame shows it.
        frame: That frame.
        ascends: Whether the program makes them large: it began with a negative number.
    """

    tensors: tuple[Tensor, ...]
    where: tuple[CodeType, int] | None
    frame: FrameType | None
    ascends: bool = False


class SkippedLosses(Protocol):
    """What `LossCheck` reports to."""

    def skipped_began(self, loss: Tensor, number: Any, frame: FrameType) -> None:
        """Called once for each backward pass of a skipped step that began at a single number.

        Args:
            loss: The tensor.
            number: Its value, which is finite; None if it is on a device, where it is not read.
            frame: That of `torch.autograd.backward`.
        """

    def skipped_unread(self) -> None:
        """Called once for each backward pass of a skipped step that began otherwise."""


class LossCheck:
    """The losses of skipped steps, each read from the frame of its active backward pass.

    See Note [Cold caches] in `kedge.watch.step`.

    Args:
        handler: Receives the losses.

    Attributes:
        on: Whether the current step is skipped.
        task: The last backward pass whose loss was checked.
    """

    __slots__ = ("_code", "_depth", "_graph_task", "handler", "on", "task")

    def __init__(self, handler: SkippedLosses) -> None:
        self.handler = handler
        self.on = False
        self.task = -1
        self._depth = 0
        self._code = _backward_code()
        self._graph_task = graph_task

    def is_finite(self) -> bool:
        """Whether the loss is finite, was found to be before, or is unknown: on a device it is not read."""
        task = self._graph_task()
        if task == self.task:
            return True

        try:
            frame: FrameType | None = sys._getframe(self._depth)  # its depth in the last pass
        except ValueError:  # the stack is not as deep
            frame = None
        if frame is None or frame.f_code is not self._code:
            frame = self._find()
        if frame is None:
            self.handler.skipped_unread()
            self.task = task
            return True

        value = frame.f_locals.get("tensors")
        if type(value) is tuple and len(value) == 1:
            value = value[0]
        if type(value) is Tensor and value.numel() == 1:
            number = value.item() if value.is_cpu else None
            if number is not None and not isfinite(number):
                return False
            self.handler.skipped_began(value, number, frame)
        else:
            self.handler.skipped_unread()
        self.task = task
        return True

    def _find(self) -> FrameType | None:
        self._code = _backward_code()
        frame: FrameType | None = sys._getframe(1)
        depth = 0
        while frame is not None:
            if frame.f_code is self._code:
                self._depth = depth
                return frame
            frame = frame.f_back
            depth += 1

        # A device's backward pass has a thread of its own, for which another one waits.
        self._depth = 0
        for top in _other_threads():
            for frame in islice(frames_around(top), _NEAR):
                if frame.f_code is self._code:
                    return frame
        return None


def _backward_code() -> CodeType | None:
    return getattr(torch.autograd.backward, "__code__", None)


def _grad_code() -> CodeType | None:
    return getattr(torch.autograd.grad, "__code__", None)


def began() -> BackwardStart:
    """Return the start of the active backward pass of this thread.

    If passes are nested, it is that of the outermost.
    """
    variables = {
        code: name
        for code, name in ((_backward_code(), "tensors"), (_grad_code(), "outputs"))
        if code is not None
    }
    outermost = _outermost(variables, sys._getframe(1))
    if outermost is None or _is_of_stage(outermost):
        return BackwardStart((), None, None)
    given = outermost.f_locals.get(variables[outermost.f_code], ())
    tensors = tuple(each for each in _each(given) if isinstance(each, Tensor))
    line = programs_line(outermost)
    if line is None:
        return BackwardStart(tensors, None, None)
    where = line.f_code, line.f_lineno
    return BackwardStart(tensors, where, line, ascends(outermost))


def taken_for() -> tuple[Tensor, ...]:
    """Return the tensors whose gradients the active `torch.autograd.grad` returns; none in another pass."""
    code = _grad_code()
    if code is None:
        return ()
    outermost = _outermost({code}, sys._getframe(1))
    if outermost is None:
        return ()
    inputs = _each(outermost.f_locals.get("inputs", ()))
    return tuple(each for each in inputs if isinstance(each, Tensor))


def _outermost(codes: Container[CodeType], here: FrameType) -> FrameType | None:
    """Return the outermost active frame of some functions, in the first thread that has one.

    It begins at the caller's frame: as a variable of its own, a frame would keep itself alive, and
    the loss with it.
    """
    for frame in _threads(here):
        found = [each for each in frames_around(frame) if each.f_code in codes]
        if found:
            return found[-1]
    return None


def ascends(backward: FrameType) -> bool:
    """Whether a backward pass began with a negative number, as far as it is known: on a device it is not read.

    Args:
        backward: The frame of `torch.autograd.backward` or `torch.autograd.grad`.
    """
    given = _each(_given(backward))
    numbers = [each for each in given if isinstance(each, Tensor) and each.numel() == 1]
    if not numbers or len(numbers) < len(given):
        return False
    if any(map(modes.is_wrapped, numbers)):
        return False
    return all(modes.has_data(each) and each.is_cpu and each.item() < 0 for each in numbers)


def _threads(here: FrameType) -> Iterator[FrameType]:
    """Yield a frame of this thread, then those of the other threads.

    A device's backward has a thread of its own.
    """
    yield here
    yield from _other_threads()


def _other_threads() -> Iterator[FrameType]:
    mine = threading.get_ident()
    for thread, frame in frames_of_threads().items():
        if thread != mine:
            yield frame


def _is_of_stage(frame: FrameType) -> bool:
    """Whether a backward pass begins at no loss, but at gradients of a pipeline's next stage."""
    caller = frame.f_back
    if caller is None or not caller.f_globals.get("__name__", "").startswith(_PIPELINES):
        return False
    return any(grad is not None for grad in _each(_given(frame)))


def _given(backward: FrameType) -> Any:
    """Return the gradients that a backward pass was given to begin with."""
    variables = backward.f_locals
    return variables.get("grad_tensors", variables.get("grad_outputs"))


def _each(tensors: Any) -> tuple[Any, ...]:
    if isinstance(tensors, (tuple, list)):
        return tuple(tensors)
    return (tensors,)


def programs_line(frame: FrameType) -> FrameType | None:
    """Return the frame of the program that called.

    Failing that, the nearest frame of an installed library.
    """
    above = frame.f_back
    library = None
    while above is not None:
        file = above.f_code.co_filename
        if not is_between(file):
            if not is_installed(file):
                return above
            library = library or above
        above = above.f_back
    return library


def frame_below(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame, if the program's is around it, else that one.

    Between the two lies a trainer, which has the lines that computed the loss. On a thread of its
    own, a backward pass has no such frames around it.
    """
    here = sys._getframe(1)
    if any(each is frame for each in frames_around(here)):
        return here
    return frame


def operation_of(value: Tensor) -> tuple[str | None, str]:
    """Return the name of the node that made a tensor, and that of its operation: ``nll_loss``."""
    if value.grad_fn is None:
        return None, "leaf"
    return value.grad_fn.name(), plain_name(value.grad_fn.name())
