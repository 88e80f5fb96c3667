"""The values that a function can reach: its modules and tensors, by the names that they have in its code.

These are the variables of the functions around it, the global variables that it names, its
defaults, the arguments that a `functools.partial` binds, the object of a bound method, and the
attributes of all these. Kedge does not search the functions that it calls.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from kedge.calls.closure import defaults, enclosed, names_in
from kedge.torch_internals import dynamo

_MOST = 1_000
"""The items of a list, tuple or dict up to which it is searched."""
_NO_OBJECTS = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    nn.Module,
    Tensor,
)


@dataclass
class FunctionValues:
    """The modules and tensors that a function can reach.

    Attributes:
        modules: A module that holds the function's modules under their names.
        roots: The paths of these in it.
        tensors: The tensors.
        compiled: Whether one of the modules is compiled.
    """

    modules: nn.Module = field(default_factory=nn.Module)
    roots: list[str] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    compiled: bool = False

    def add(self, name: str, value: Any) -> None:
        """Add a value, or the modules and tensors that it holds as items or attributes."""
        if isinstance(value, (nn.Module, Tensor)):
            self._add_one(self.modules, "", name, value)
            return

        held = dict(_held_by(value))
        group = self.modules
        if any(isinstance(each, nn.Module) for each in held.values()):
            group = nn.Module()
            self.modules.add_module(_free(self.modules, name), group)
        for key, each in held.items():
            self._add_one(group, f"{name}.", key, each)

    def _add_one(self, group: nn.Module, prefix: str, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.tensors.append(value)
        elif isinstance(value, nn.Module):
            self.compiled = self.compiled or dynamo.compiles(value)
            name = _free(group, name)
            group.add_module(name, dynamo.unwrap(value))
            self.roots.append(prefix + name)


def _free(group: nn.Module, name: str) -> str:
    """Return a name for a module in another.

    An attribute that it has already, such as ``half``, gets an underscore.
    """
    name = name.replace(".", "_") or "_"
    while hasattr(group, name):
        name += "_"
    return name


def _held_by(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items of a container that is not very large, or the attributes of an object."""
    if isinstance(value, (list, tuple, dict)) and len(value) > _MOST:
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    elif not isinstance(value, _NO_OBJECTS):
        items = getattr(value, "__dict__", {}).items()

    for name, each in list(items):
        if isinstance(each, (nn.Module, Tensor)):
            yield str(name), each


def values_of(function: Any) -> FunctionValues:
    """Return the modules and tensors that a function can reach; it is not called."""
    found = FunctionValues()
    seen: set[int] = set()
    for name, value in _named(function):
        if id(value) not in seen:
            seen.add(id(value))
            found.add(name, value)
    return found


def _named(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        for i, value in enumerate(function.args):
            yield f"argument{i}", value
        yield from function.keywords.items()
        yield from _named(function.func)
    elif isinstance(function, types.MethodType):
        yield "self", function.__self__
        yield from _named(function.__func__)
    elif isinstance(function, types.FunctionType):
        outside = function.__globals__
        yield from enclosed(function).items()
        for name in dict.fromkeys(names_in(function.__code__)):
            if name in outside:
                yield name, outside[name]
        yield from defaults(function).items()
        if hasattr(function, "__wrapped__"):
            yield from _named(inspect.unwrap(function))
    elif not isinstance(function, types.BuiltinFunctionType):
        yield "self", function


def takes_arguments(function: Any) -> bool:
    """Whether a function has to be given arguments, or may take any number of them.

    True also if that is not known.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins such as `torch.exp` have no signature
        return True
    return any(p.default is p.empty for p in parameters)
