"""Operators that compiled code neither removes nor reorders, and that it runs outside of graphs of the device.

# Note [Outside of graphs]
``torch.compile(mode="reduce-overhead")`` captures compiled code in graphs of the device. Python
that an operator runs would run in the capture alone. So Inductor is told to divide its graph at
Kedge's operators: what lies between two of them is captured, they run each time. PyTorch's tag
`cudagraph_unsafe` is not enough, as Inductor does not look for it in operators that have an effect.

The setting is part of the key under which Inductor keeps code on disk. So it is there only while
code with operators is compiled for such a device: code without them is found where an earlier run
has left it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kedge.torch_internals.corners import find


def has_effect(library: torch.library.Library, name: str) -> bool:
    """Register an operator as having an ordered effect; returns whether this PyTorch can."""
    ordered = find("torch._library.effects:EffectType.ORDERED")
    register = getattr(library, "_register_effectful_op", None)
    if ordered is None or register is None:
        return False
    register(name, ordered)
    return True


@contextmanager
def all_or_none(library: torch.library.Library) -> Iterator[None]:
    """Context that defines operators: an error or an interrupt inside removes the library.

    They can be defined again then. PyTorch would otherwise refuse the next import of the module
    that defines them, for the rest of the process.
    """
    try:
        yield
    except BaseException:
        remove = getattr(library, "_destroy", None)
        if remove is not None:
            remove()
        raise


_SETTING = "custom_should_partition_ops"
_divided: set[str] = set()


def divide_graphs_at(names: Iterable[str]) -> None:
    """Run operators outside of graphs of the device; see Note [Outside of graphs]."""
    config: Any = importlib.import_module("torch._inductor.config")
    known = getattr(config, _SETTING, None)
    if known is not None:
        added = [name for name in names if name not in known]
        _divided.update(added)
        setattr(config, _SETTING, [*known, *added])


def leave_graphs_whole() -> None:
    """End what `divide_graphs_at` began, for the code that is compiled next."""
    if _divided:
        config: Any = importlib.import_module("torch._inductor.config")
        left = [name for name in getattr(config, _SETTING) if name not in _divided]
        setattr(config, _SETTING, left)
        _divided.clear()
