"""Values as JSON, with their tensors beside it: the variables of a program, the options of an optimizer.

# Note [Plain files]
What is kept of a program is to be read without Kedge, and without a pickle. Tensors are safetensors,
everything else is JSON, where ``{"tensor": NAME}`` stands for the tensor of that name in the file
beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kedge.repro.package import copy_on_cpu
from kedge.sites import leaves


@dataclass
class PlainValues:
    """Values that become JSON, and the tensors beside it; see Note [Plain files].

    Attributes:
        tensors: Copies of the tensors, by the names that the JSON has.
        left_out: The names of what is neither a tensor nor a value of JSON.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def packed(self, name: str, value: Any) -> Any:
        """Return the JSON of a value, and copy its tensors; what it cannot have is None in it."""
        if isinstance(value, Tensor):
            while name in self.tensors:
                name += "'"
            self.tensors[name] = copy_on_cpu(value)
            return {"tensor": name}
        if isinstance(value, Mapping) and not _is_tensor(value):
            return {str(key): self.packed(f"{name}.{key}", each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.packed(f"{name}.{at}", each) for at, each in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        self.left_out.append(name)
        return None


def unpacked(entry: Any, tensors: Mapping[str, Tensor], now: Any = None) -> Any:
    """Return the value of some JSON, as `PlainValues` has written it.

    Args:
        entry: The JSON.
        tensors: The tensors beside it.
        now: A value of the same kind, from which the value takes its types, and the device of its
            tensors; None without one.
    """
    if _is_tensor(entry):
        device = None
        if isinstance(now, Tensor):
            device = now.device
        # A copy: what runs may change it in place, and in the memory of a file it is not aligned
        # as the program's was, which kernels round by.
        return tensors[entry["tensor"]].to(device, copy=True)
    if isinstance(entry, dict):
        return _mapping(entry, tensors, now)
    if isinstance(entry, list):
        return _sequence(entry, tensors, now)
    return entry


def _is_tensor(entry: Any) -> bool:
    """Whether JSON stands for a tensor; a mapping of the program that looks so cannot be kept."""
    if not isinstance(entry, Mapping) or entry.keys() != {"tensor"}:
        return False
    return isinstance(entry["tensor"], str)


def _mapping(entry: Mapping[str, Any], tensors: Mapping[str, Tensor], now: Any) -> Any:
    known = {}
    if isinstance(now, Mapping):
        known = {str(key): key for key in now}
    values = {}
    for name, each in entry.items():
        like = None
        if name in known:
            like = now[known[name]]
        values[known.get(name, name)] = unpacked(each, tensors, like)
    if isinstance(now, Mapping) and type(now) is not dict:
        return leaves.put(now, dict(leaves.find(values)))
    return values


def _sequence(entry: list[Any], tensors: Mapping[str, Tensor], now: Any) -> Any:
    known: list[Any] = [None] * len(entry)
    if isinstance(now, (list, tuple)):
        known[: len(now)] = now
    values = [unpacked(each, tensors, like) for each, like in zip(entry, known, strict=False)]
    if not isinstance(now, tuple):
        return values
    if hasattr(now, "_fields"):
        return type(now)(*values)
    return tuple(values)
