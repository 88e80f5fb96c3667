"""The backward pass and the node that this thread is in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kedge.torch_internals.corners import find, late

graph_task: Callable[[], int] = late("torch:_C._current_graph_task_id", lambda: -1)
"""The number of the backward pass that this thread is in; -1 outside of one."""


def graph_task_function() -> Callable[[], int]:
    """Return PyTorch's own function behind `graph_task`, for where one call more counts."""
    return find("torch:_C._current_graph_task_id") or graph_task


current_node: Callable[[], Any] = late("torch:_C._current_autograd_node", lambda: None)
"""The node of the graph that this thread runs; None outside of a backward pass."""


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
