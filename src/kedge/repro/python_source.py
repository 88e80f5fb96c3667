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
        if type(value) in _PLAIN:
            return (
                repr(value)
                if not isinstance(value, (str, bytes)) or len(value) < _LONG
                else self.lacking(value)
            )
        if isinstance(value, _TORCH):
            return str(value)
        if type(value) is float:
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if isinstance(value, torch.device):
            return f'torch.device("{value}")'
        return self._structure(value, depth) if depth < _DEEP else self.lacking(value)

    def lacking(self, value: Any) -> str:
        """Return the placeholder of a value that cannot be written."""
        text = f"{type(value).__qualname__}: {_brief(value)}"
        self.missing.append(text)
        return f"missing({text!r})"

    def _structure(self, value: Any, depth: int) -> str:
        kind, write = type(value), functools.partial(self.write, depth=depth + 1)
        if kind in _SEQUENCES:
            opening, closing = _SEQUENCES[kind]
            comma = "," if kind is tuple and len(value) == 1 else ""
            return opening + ", ".join(write(v) for v in value) + comma + closing
        if kind is dict:
            return "{" + ", ".join(f"{write(k)}: {write(v)}" for k, v in value.items()) + "}"
        if isinstance(value, functools.partial):
            given = (
                f", **{write(value.keywords)}" if value.keywords else ""
            )  # any text can be such a name
            return f"functools.partial({', '.join(map(write, (value.func, *value.args)))}{given})"
        return imported(value) or self._named(value, depth)

    def _named(self, value: Any, depth: int) -> str:
        """Return an enumeration's member or a named tuple as an expression with its class, other values as objects."""
        made = imported(type(value))
        if made and isinstance(value, enum.Enum):
            return f"{made}[{value.name!r}]"
        if made and isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{made}({', '.join(self.write(v, depth + 1) for v in value)})"
        return self._object(value, depth)

    def _object(self, value: Any, depth: int) -> str:
        """Return an object as an expression of its class and its attributes."""
        kind: Any = type(value)
        plain = kind.__new__ is object.__new__ and isinstance(
            getattr(value, "__dict__", None), dict
        )
        heap = kind.__flags__ & (
            1 << 9
        )  # a class defined in Python, so without state besides its attributes
        if isinstance(value, nn.Module) or not (plain and heap and imported(kind)):
            return self.lacking(value)
        if isinstance(value, Mapping) or hasattr(kind, "__slots__"):
            return self.lacking(value)
        return f"revived({imported(kind)}, {self.write(vars(value), depth)})"


def imported(thing: Any) -> str:
    """Return the expression that imports an object; empty if it cannot be imported."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(name, str) or "<" in name:
        return ""
    last = name.rpartition(".")[2]
    for home, own in (
        (module, name),
        ("torch", last),
        ("torch.nn.functional", last),
    ):  # torch.log has an inner name
        found: Any = sys.modules.get(home or "")
        for part in own.split("."):
            found = getattr(found, part, None)
        if found is thing:
            return f"imported({home!r}, {own!r})"
    return ""


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module's own code has set, without parameters, buffers, modules, hooks and shards."""
    own = {n: v for n, v in vars(module).items() if n not in _BARE and not n.startswith(SHARDING)}
    if isinstance(module, nn.RNNBase):  # rebuilt from the parameters
        own = {n: v for n, v in own.items() if n not in REBUILT}
    return own


def _brief(value: Any) -> str:
    return object.__repr__(value) if isinstance(value, Tensor) else reprlib.repr(value)
