"""What an optimizer holds that no watched model was seen to hold."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn

from kedge.torch_internals.module_tables import is_made, own_children, own_parameters
from kedge.torch_internals.source_lines import is_between


def holders_of(params: Iterable[nn.Parameter]) -> list[nn.Module]:
    """Return the outermost modules that hold some parameters; this looks through all objects, so ask seldom."""
    wanted = {id(p) for p in params}
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module) and is_made(o)]
    parents = {id(child): m for m in modules for child in own_children(m).values() if child is not None}
    found: dict[int, nn.Module] = {}
    for module in modules:
        if any(id(p) in wanted for p in own_parameters(module).values()):
            top = _outermost(module, parents)
            found[id(top)] = top
    return list(found.values())


def _outermost(module: nn.Module, parents: Mapping[int, nn.Module]) -> nn.Module:
    seen = {id(module)}
    while (parent := parents.get(id(module))) is not None and id(parent) not in seen:
        module = parent
        seen.add(id(module))
    return module


def names_in_frames(tensors: Sequence[Tensor]) -> list[str]:
    """Return the names of the program's variables that hold some tensors: ``w``, ``weights.0``; else ``param0``."""
    names: dict[int, str] = {}
    wanted = {id(t) for t in tensors}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_between(frame.f_code.co_filename):
            for variables in (frame.f_locals, frame.f_globals):
                for name, value in list(variables.items()):
                    _note(names, wanted, name, value)
        frame = frame.f_back
    return [names.get(id(t), f"param{i}") for i, t in enumerate(tensors)]


def _note(names: dict[int, str], wanted: set[int], name: str, value: Any) -> None:
    if name.startswith("_"):
        return
    if id(value) in wanted:
        names.setdefault(id(value), name)
    elif type(value) in (list, tuple):
        for i, each in enumerate(value):
            if id(each) in wanted:
                names.setdefault(id(each), f"{name}.{i}")
    elif type(value) is dict:
        for key, each in list(value.items()):
            if id(each) in wanted and isinstance(key, str):
                names.setdefault(id(each), f"{name}.{key}")
