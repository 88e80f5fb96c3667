"""Values written as Python source, so that a script can rebuild them without a pickle.

A value that cannot be written is replaced by a call that describes it: ``missing("its
description")``.
"""

from __future__ import annotations

import enum
import functools
import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kedge.torch_internals.module_tables import REBUILT, SHARDING

_PLAIN = (type(None), bool, int, str, bytes, type(Ellipsis))
_TORCH = (torch.dtype, torch.memory_format, torch.layout)
_SEQUENCES: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("set([", "])"),
    frozenset: ("frozenset([", "])"),
    torch.Size: ("torch.Size([", "])"),
}
_LONG = 2_000
_DEEP = 6
_BARE = frozenset(vars(nn.Module()))


@dataclass
class SourceWriter:
    """Writes values as source; tensors become names.

    Attributes:
        names: The expression of each known tensor, by identity.
        new: Makes a tensor known.
        missing: Descriptions of the values that could not be written.
    """

    names: dict[int, str]
    new: Callable[[Tensor], None]
    missing: list[str] = field(default_factory=list)

    def write(self, value: Any, depth: int = 0) -> str:
        """Return a value as a Python expression."""
        if isinstance(value, Tensor):
            if id(value) not in self.names:
                self.new(value)
            return self.names[id(value)]
        if isinstance(value, (str, bytes)) and len(value) >= _LONG:
            return self.lacking(value)
        if type(value) in _PLAIN or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if type(value) is float:
            return f'float("{value}")'
        if isinstance(value, _TORCH):
            return str(value)
        if isinstance(value, torch.device):
            return f'torch.device("{value}")'
        if depth >= _DEEP:
            return self.lacking(value)
        return self._structure(value, depth)

    def lacking(self, value: Any) -> str:
        """Return the placeholder of a value that cannot be written."""
        text = f"{type(value).__qualname__}: {_brief(value)}"
        self.missing.append(text)
        return f"missing({text!r})"

    def _structure(self, value: Any, depth: int) -> str:
        kind = type(value)
        write = functools.partial(self.write, depth=depth + 1)
        if kind in _SEQUENCES:
            opening, closing = _SEQUENCES[kind]
            inside = ", ".join(map(write, value))
            if kind is tuple and len(value) == 1:
                inside += ","
            return f"{opening}{inside}{closing}"
        if kind is dict:
            return "{" + ", ".join(f"{write(k)}: {write(v)}" for k, v in value.items()) + "}"
        if isinstance(value, functools.partial):
            given = list(map(write, (value.func, *value.args)))
            if value.keywords:  # any text can be such a name
                given.append(f"**{write(value.keywords)}")
            return f"functools.partial({', '.join(given)})"
        if imported(value):
            return imported(value)

        made = imported(kind)
        if made and isinstance(value, enum.Enum):
            return f"{made}[{value.name!r}]"
        if made and isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{made}({', '.join(map(write, value))})"
        return self._object(value, depth)

    def _object(self, value: Any, depth: int) -> str:
        """Return an object as an expression of its class and its attributes."""
        kind: Any = type(value)
        has_attributes = isinstance(getattr(value, "__dict__", None), dict)
        plain = kind.__new__ is object.__new__ and has_attributes
        # A class defined in Python has no state besides its attributes.
        is_python = kind.__flags__ & (1 << 9)
        if isinstance(value, nn.Module) or not (plain and is_python and imported(kind)):
            return self.lacking(value)
        if isinstance(value, Mapping) or hasattr(kind, "__slots__"):
            return self.lacking(value)
        return f"revived({imported(kind)}, {self.write(vars(value), depth)})"


def imported(thing: Any) -> str:
    """Return the expression that imports an object; empty if it cannot be imported."""
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", None)
    if not isinstance(name, str) or "<" in name:
        return ""
    last = name.rpartition(".")[2]
    # Functions such as torch.log have an inner name.
    homes = ((module, name), ("torch", last), ("torch.nn.functional", last))
    for home, own in homes:
        found: Any = sys.modules.get(home or "")
        for part in own.split("."):
            found = getattr(found, part, None)
        if found is thing:
            return f"imported({home!r}, {own!r})"
    return ""


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module's own code has set.

    Parameters, buffers, modules, hooks and shards are not among them.
    """
    left_out = set(_BARE)
    if isinstance(module, nn.RNNBase):  # rebuilt from the parameters
        left_out |= set(REBUILT)
    own = vars(module)
    names = [name for name in own if name not in left_out and not name.startswith(SHARDING)]
    return {name: own[name] for name in names}


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return object.__repr__(value)
    return reprlib.repr(value)
