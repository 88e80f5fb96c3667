"""What autograd nodes hold, and what lies behind them.

# Note [Reading without unpacking]
A node gives what it saved in two ways. ``_saved_self`` unpacks it, by the hooks under which it was
packed: under activation checkpointing that would run the block again. ``_raw_saved_self`` is the
`SavedTensor` itself, whose ``data`` is the tensor, or what the program's own hook packed it into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from kedge.torch_internals.corners import find, late

SavedTensor: Any = find("torch:_C._autograd.SavedTensor") or ()
operation_number: Callable[[], int] = late("torch:_C._autograd._get_sequence_nr", lambda: 0)
"""The number that the next operation of this thread gets in the graph."""
RAW = "_raw_saved_"
_NUMBERS = (torch.float64, torch.int64, torch.complex128, torch.bool)


@cache
def fields(kind: type[Node]) -> tuple[str, ...]:
    """Return what nodes of a kind call that which they save: the ``self`` of ``_raw_saved_self``."""
    return tuple(name.removeprefix(RAW) for name in dir(kind) if name.startswith(RAW))


def saved_by(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield the name and the `SavedTensor` of everything that a node saved; nothing once that is freed."""
    for name in fields(type(node)):
        try:
            saved = getattr(node, RAW + name)
        except RuntimeError:  # its backward has run, and has freed what it saved
            continue
        for each in saved if isinstance(saved, tuple) else (saved,):
            if isinstance(each, SavedTensor):
                yield name, each


def is_number(tensor: Tensor) -> bool:
    """Whether it is what PyTorch makes of a Python number, as of the 2 in ``x * 2``."""
    return tensor.dim() == 0 and tensor.device.type == "cpu" and tensor.dtype in _NUMBERS


def behind(roots: Iterable[Node | None], since: int = 0) -> Iterator[Node]:
    """Yield each node of a graph once, from the nodes that made its results.

    Args:
        roots: Those nodes; None is passed over.
        since: The number, in the order of execution, from which nodes are wanted; earlier ones depend on no later one.
    """
    stack = [node for node in roots if node is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node._sequence_nr() < since:
            continue
        yield node
        new = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= new
        stack += new
