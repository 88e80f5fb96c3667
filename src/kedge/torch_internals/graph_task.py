"""The backward pass and the node that this thread is in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor

from kedge.frames import frames_around, frames_of_threads
from kedge.torch_internals.corners import at_once, find, late

graph_task: Callable[[], int] = at_once("torch:_C._current_graph_task_id", lambda: -1)
"""The number of the backward pass that this thread is in; -1 outside of one."""


current_node: Callable[[], Any] = late("torch:_C._current_autograd_node", lambda: None)
"""The node of the graph that this thread runs; None outside of a backward pass."""


def leaf_in_backward() -> Tensor | None:
    """Return the leaf whose gradient this thread accumulates at present; None otherwise."""
    leaf: Tensor | None = getattr(current_node(), "variable", None)
    return leaf


def in_backward() -> bool:
    """Whether this thread is inside a backward pass, so that a forward in it is a recompute."""
    return graph_task() != -1


def at_end_of_backward(work: Callable[[], None]) -> bool:
    """Call a function at the end of the current backward pass; returns whether that is possible.

    It runs after all callbacks that others queued during the pass: DDP exchanges gradients in one.
    """
    queue = find("torch.autograd:Variable._execution_engine.queue_callback")
    if queue is None:
        return False
    queue(lambda: queue(work))
    return True


class BackwardCall(NamedTuple):
    """The program's call of autograd that this thread's backward pass belongs to.

    Attributes:
        roots: What it differentiates.
        grads: The gradients of these.
        nested: Whether this pass is one that a reentrant checkpoint, or another function of
            autograd, runs inside of it.
    """

    roots: Sequence[Any]
    grads: Sequence[Any]
    nested: bool

    @property
    def marks(self) -> tuple[Tensor, ...]:
        """Tensors by whose identity the call is known.

        PyTorch makes a new gradient for each call without one.
        """
        first = (*self.roots[:1], *self.grads[:1])
        return tuple(each for each in first if isinstance(each, Tensor))


def backward_call() -> BackwardCall | None:
    """Return the call of the current backward pass.

    It is read from the frames of this thread, or of the one that it works for.
    """
    run = find(RUN)
    apply = find(_APPLY)
    if run is None or apply is None:
        return None
    own = list(frames_around(sys._getframe(1)))
    calls = [frame for frame in own if frame.f_code is run]
    inside = bool(calls) and any(frame.f_code is apply for frame in own[own.index(calls[-1]) :])
    if calls and not inside:
        return _read(calls[-1], nested=len(calls) > 1)
    others: list[FrameType] = []
    for top in frames_of_threads().values():
        others += [frame for frame in _outermost(top, run) if frame not in own]
    if len(others) != 1:  # a thread of a device works for one call
        return None
    return _read(others[0], nested=inside)


def _outermost(frame: FrameType, run: CodeType) -> list[FrameType]:
    return [each for each in frames_around(frame) if each.f_code is run][-1:]


def _read(frame: FrameType, *, nested: bool) -> BackwardCall | None:
    here = frame.f_locals
    given = here.get("args") or ((),)
    return BackwardCall(tuple(here.get("t_outputs", ())), tuple(given[0]), nested)


RUN = "torch.autograd.graph:_engine_run_backward.__code__"
"""Where the code is in which the program's thread waits for a backward pass."""

_APPLY = "torch.autograd.function:BackwardCFunction.apply.__code__"
