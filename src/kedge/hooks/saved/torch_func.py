"""Stepping aside for the transforms of `torch.func`, which refuse to run under saved-tensor hooks.

# Note [Stepping aside]
``torch.func.grad``, ``vjp``, ``jacrev`` and ``hessian`` begin with a check that no pair is in force on their
thread, and then forbid any for as long as they run. There is no way to be told beforehand but in the
function by which they do it, `torch.autograd.graph.disable_saved_tensors_hooks`. So while a keeper is in
force that function, which stays the same object, has one of ours inside: it lifts our pairs, does what it did, and puts
them back. A pair of the program's own still makes it refuse.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd import graph

from kedge.hooks.saved.pairs import lane
from kedge.torch_internals.saved_hooks import disabled

_lock = threading.Lock()
_users = 0
_original: Callable[[str], Iterator[None]] | None = getattr(graph.disable_saved_tensors_hooks, "__wrapped__", None)


def _cell() -> Any:
    """The place in which `contextlib.contextmanager` has the function; None where PyTorch has made it otherwise."""
    cells = getattr(graph.disable_saved_tensors_hooks, "__closure__", None) or ()
    return next((cell for cell in cells if cell.cell_contents in (_original, _lifting)), None)


def _lifting(error_message: str) -> Iterator[None]:
    assert _original is not None  # noqa: S101 - it would not have been put in its place
    if not lane.pairs or disabled() is not None:
        yield from _original(error_message)
        return
    for live in list(lane.lives):
        live.step_aside("torch.func")
    stack = lane.lift()
    try:
        yield from _original(error_message)
    finally:
        lane.lower(stack)


def begin() -> None:
    """Be asked from now on; see Note [Stepping aside]."""
    global _users  # noqa: PLW0603 - PyTorch has one such function
    with _lock:
        _users += 1
        if _users == 1 and (cell := _cell()) is not None:
            cell.cell_contents = _lifting


def end() -> None:
    """Be asked no longer; the last one leaves everything as it was."""
    global _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        if _users == 0 and (cell := _cell()) is not None:
            cell.cell_contents = _original
