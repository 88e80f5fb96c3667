"""Removal of Kedge's hook pairs during transforms of `torch.func`, which refuse to run under saved-tensor hooks.

# Note [Stepping aside]
``torch.func.grad``, ``vjp``, ``jacrev`` and ``hessian`` begin with a check that no pair is in force
on their thread, and then forbid any while they run. The only place to intercept this is the
function that they call for it, `torch.autograd.graph.disable_saved_tensors_hooks`. So while a
keeper is in force, Kedge replaces the code inside that function, which stays the same object: it
lifts the Kedge pairs, runs the original code, and puts the pairs back. With a pair of the program's
own it still refuses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd import graph

from kedge.hooks.saved.pairs import pair_stack
from kedge.torch_internals.saved_hooks import disabled

_lock = threading.Lock()
_users = 0
_original: Callable[[str], Iterator[None]] | None = getattr(
    graph.disable_saved_tensors_hooks, "__wrapped__", None
)


def _cell() -> Any:
    """Return the closure cell in which `contextlib.contextmanager` holds the function.

    None if PyTorch differs there.
    """
    cells = getattr(graph.disable_saved_tensors_hooks, "__closure__", None) or ()
    return next((cell for cell in cells if cell.cell_contents in (_original, _lifting)), None)


def _lifting(error_message: str) -> Iterator[None]:
    assert _original is not None  # noqa: S101 - without an original, this is never installed
    if not pair_stack.pairs or disabled() is not None:
        yield from _original(error_message)
        return
    for live in list(pair_stack.lives):
        live.step_aside("torch.func")
    stack = pair_stack.lift()
    try:
        yield from _original(error_message)
    finally:
        pair_stack.lower(stack)


def begin() -> None:
    """Replace the code of `disable_saved_tensors_hooks` until `end`.

    See Note [Stepping aside].
    """
    global _users  # noqa: PLW0603 - PyTorch has one such function
    with _lock:
        _users += 1
        if _users == 1 and (cell := _cell()) is not None:
            cell.cell_contents = _lifting


def end() -> None:
    """End one `begin`; the last one restores the original code."""
    global _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        if _users == 0 and (cell := _cell()) is not None:
            cell.cell_contents = _original
