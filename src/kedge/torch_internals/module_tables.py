"""A module's own parameters, buffers and modules, and those of all modules inside it.

Entries of None are included. The tables are read, and methods such as `named_modules` are not
called: a class may have its own, which raise or leave things out, and those of PyTorch compare
modules, for which a class may have its own `__eq__` and `__hash__`, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kedge.torch_internals.corners import lacks

REBUILT = ("_flat_weights", "_flat_weight_refs")
"""Attributes of recurrent modules that follow from their parameters."""

SHARDING = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""What the names of attributes begin with that ``fully_shard`` and its like give to modules."""

_Table = Mapping[str, Any]


# Plain functions, because Dynamo reads some of them.
def _parameters(module: nn.Module) -> _Table:
    return module._parameters


def _buffers(module: nn.Module) -> _Table:
    return module._buffers


def _children(module: nn.Module) -> _Table:
    return module._modules


def _named_parameters(module: nn.Module) -> _Table:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def _named_buffers(module: nn.Module) -> _Table:
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


def _named_children(module: nn.Module) -> _Table:
    return dict(module.named_children())


_hidden = lacks("module_tables")
own_parameters: Callable[[nn.Module], Mapping[str, Tensor | None]] = (
    _named_parameters if _hidden else _parameters
)
own_buffers: Callable[[nn.Module], Mapping[str, Tensor | None]] = (
    _named_buffers if _hidden else _buffers
)
own_children: Callable[[nn.Module], Mapping[str, nn.Module | None]] = (
    _named_children if _hidden else _children
)


def named_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return a module and all inside by every path that they have.

    If one contains itself, they are by their first paths.
    """
    if _contains_itself(module):
        return modules_in(module)
    return dict(_walk(module, "", None))


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters of a module by every path that they have.

    If a module contains itself, they are by their first paths.
    """
    if _contains_itself(module):
        return parameters_in(module)
    found: dict[str, Any] = {}
    for path, inside in _walk(module, "", None):
        for name, param in own_parameters(inside).items():
            if param is not None:
                found[_joined(path, name)] = param
    return found


def module_at(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module of a model at a path; None if there is none.

    `nn.Module.get_submodule` is not there in TorchScript.
    """
    module: nn.Module | None = model
    for name in path.split(".") if path else ():
        if module is None:
            return None
        module = dict(own_children(module).items()).get(name)
    return module


def lasting_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers that `state_dict` has, by its names, each under every name."""
    paths = named_modules(module)
    found: dict[str, Tensor] = {}
    for path, inside in paths.items():
        passing = getattr(inside, "_non_persistent_buffers_set", ())
        for name, value in (*own_parameters(inside).items(), *own_buffers(inside).items()):
            if value is not None and name not in passing:
                found[_joined(path, name)] = value
    return found


def modules_in(module: nn.Module) -> dict[str, nn.Module]:
    """Return a module and all inside, each once, by its first path.

    They are in the order of `nn.Module.named_modules`.
    """
    return dict(_walk(module, "", set()))


def parameters_in(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters of a module, each once, by its first path."""
    return _once(module, own_parameters)


def buffers_in(module: nn.Module) -> dict[str, Tensor]:
    """Return all buffers of a module, each once, by its first path."""
    return _once(module, own_buffers)


def parameters_and_buffers(module: nn.Module) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return all parameters and all buffers of a module, each once, in any order: at every step of a program."""
    parameters: dict[int, Any] = {}
    buffers: dict[int, Tensor] = {}
    seen = {id(module)}
    left = [module]
    while left:
        inside = left.pop()
        for param in own_parameters(inside).values():
            if param is not None:
                parameters[id(param)] = param
        for buffer in own_buffers(inside).values():
            if buffer is not None:
                buffers[id(buffer)] = buffer
        for child in own_children(inside).values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                left.append(child)
    return list(parameters.values()), list(buffers.values())


def _once(module: nn.Module, table: Callable[[nn.Module], Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for path, inside in _walk(module, "", set()):
        for name, held in table(inside).items():
            if held is not None and id(held) not in seen:
                seen.add(id(held))
                found[_joined(path, name)] = held
    return found


def _walk(module: nn.Module, path: str, seen: set[int] | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all inside with their paths, those that are not in a set of ids."""
    if seen is not None:
        if id(module) in seen:
            return
        seen.add(id(module))
    yield path, module
    for name, child in own_children(module).items():
        if child is not None:
            yield from _walk(child, _joined(path, name), seen)


def _joined(path: str, name: str) -> str:
    if not path:
        return name
    return f"{path}.{name}"


def _contains_itself(
    module: nn.Module, around: tuple[int, ...] = (), known: set[int] | None = None
) -> bool:
    """Whether a module is inside itself, or one inside it is, so that the paths never end.

    Args:
        module: The module.
        around: The ids of the modules that it is inside.
        known: The ids of modules that were searched.
    """
    if known is None:
        known = set()
    if id(module) in around:
        return True
    if id(module) in known:
        return False
    known.add(id(module))
    around = (*around, id(module))
    for child in own_children(module).values():
        if child is not None and _contains_itself(child, around, known):
            return True
    return False


def is_made(module: nn.Module) -> bool:
    """Whether the constructor of `torch.nn.Module` has run, so that a module has its tables."""
    return ("training" if _hidden else "_parameters") in vars(module)


def empty_entries(module: nn.Module) -> list[str]:
    """Return the entries of a module that are None, if they are visible: ``parameter bias``."""
    tables: dict[str, Mapping[str, Any]] = {
        "parameter": own_parameters(module),
        "buffer": own_buffers(module),
        "module": own_children(module),
    }
    found = []
    for kind, table in tables.items():
        found += [f"{kind} {name}" for name, held in table.items() if held is None]
    return found


def holds_parameters() -> bool:
    """Whether this PyTorch shows where a module keeps its parameters, so that `put_parameter` works."""
    return not _hidden


def own_parameter(module: nn.Module, name: str) -> Tensor | None:
    """Return a module's own parameter of a name; None if it has none."""
    table = own_parameters(module)  # in TorchScript it has no `get`
    if name not in table:
        return None
    return table[name]


def parameter_of(module: nn.Module, name: str) -> Tensor | None:
    """Return what a module has as a parameter: in a replica of `DataParallel` it is an attribute."""
    if name in own_parameters(module):
        return own_parameters(module)[name]
    held = vars(module).get(name)
    return held if isinstance(held, Tensor) else None


def put_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Put a tensor in the place of a parameter, also in what a recurrent module keeps of it."""
    table: Any = own_parameters(module)
    if name not in table:
        table = vars(module)
    old = table[name]
    table[name] = value
    flat = vars(module).get(REBUILT[0])
    if isinstance(flat, list):
        for place, held in enumerate(flat):
            if held is old:
                flat[place] = value


def put_back(module: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    """Restore the buffers of a module, and remove all others."""
    present = dict(own_buffers(module))
    is_same = present.keys() == buffers.keys()
    if is_same and all(held is buffers[name] for name, held in present.items()):
        return
    if _hidden or isinstance(module, torch.jit.ScriptModule):
        for name in present.keys() - buffers.keys():
            delattr(module, name)
        for name, buffer in buffers.items():
            setattr(module, name, buffer)
        return
    table: Any = own_buffers(module)
    table.clear()
    table.update(buffers)


def is_replica(module: nn.Module) -> bool:
    """Whether `DataParallel` made a module for one call, as a replica of the hooked one."""
    return bool(vars(module).get("_is_replica", False))


def replica_of(module: Any) -> Any:
    """Return a replica of a module, as `DataParallel` makes one for a call."""
    return module._replicate_for_data_parallel()
