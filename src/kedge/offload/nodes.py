"""What autograd nodes hold, read without unpacking it: see Note [Reading without unpacking]."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import Node

_SavedTensor: Any = getattr(torch._C._autograd, "SavedTensor", ())
_RAW = "_raw_saved_"


def held_by(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield the name and the packed form of everything that a node saved; nothing once that is freed."""
    for name in _fields(type(node)):
        try:
            saved = getattr(node, _RAW + name)
        except RuntimeError:  # its backward has run, and has freed what it saved
            continue
        for each in saved if isinstance(saved, tuple) else (saved,):
            if isinstance(each, _SavedTensor):
                yield name, each.data


def behind(roots: Iterator[Node | None]) -> Iterator[Node]:
    """Yield each node of a graph once, from the nodes that made its results."""
    stack = [node for node in roots if node is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        new = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= new
        stack += new


@cache
def _fields(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name.removeprefix(_RAW) for name in dir(kind) if name.startswith(_RAW))
