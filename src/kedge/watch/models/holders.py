"""The modules of parameters that belong to no watched model."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping

from torch import nn

from kedge.torch_internals.module_tables import is_made, own_children, own_parameters


def holders_of(params: Iterable[nn.Parameter]) -> list[nn.Module]:
    """Return the outermost modules that hold some parameters. Slow: it searches all objects."""
    wanted = {id(p) for p in params}
    found_modules = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
    modules = [module for module in found_modules if is_readable(module)]
    parents: dict[int, nn.Module] = {}
    for module in modules:
        for child in own_children(module).values():
            if child is not None:
                parents[id(child)] = module

    found: dict[int, nn.Module] = {}
    for module in modules:
        if any(id(p) in wanted for p in own_parameters(module).values()):
            top = _outermost(module, parents)
            found[id(top)] = top
    return list(found.values())


def is_readable(module: nn.Module) -> bool:
    """Whether a module's tables can be read.

    One of all modules that cannot must not end the search for others.
    """
    try:
        return (
            is_made(module)
            and own_children(module) is not None
            and own_parameters(module) is not None
        )
    except Exception:  # noqa: BLE001 - of the program's class; it is reported when it is called
        return False


def _outermost(module: nn.Module, parents: Mapping[int, nn.Module]) -> nn.Module:
    seen = {id(module)}
    while (parent := parents.get(id(module))) is not None and id(parent) not in seen:
        module = parent
        seen.add(id(module))
    return module
