"""Actions as JSON and tensors, and back; nothing is pickled, and nothing is run that a file names.

# Note [What a file may hold]
An action is written as its public name and its arguments: numbers, texts, tensors, positions, and
other such actions. A file can name only the actions of a `Vocabulary`, so one from elsewhere can at
most change values of a model. A function of the program has no such form, and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from kedge.actions.edit import Edit, add, clamp, replace, scale, zero
from kedge.actions.skip import Skip, skip
from kedge.calls.arguments import described
from kedge.errors import InterventionError, KedgeError
from kedge.sites import leaves

_EDITS: dict[str, Callable[..., Any]] = {
    "add": add,
    "clamp": clamp,
    "replace": replace,
    "scale": scale,
    "skip": skip,
    "zero": zero,
}


class WrittenTensors:
    """The tensors of a file, by the names that its JSON gives them."""

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._held: list[Tensor] = []

    def add(self, tensor: Tensor) -> str:
        """Return the name of a tensor; the same one is written once.

        Raises:
            InterventionError: It has no plain form.
        """
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            raise InterventionError(
                f"{leaves.describe(tensor)} cannot be written: it is not a plain dense tensor; "
                "give one, such as tensor.to_dense()"
            )
        if tensor.is_meta or tensor.dtype is torch.complex128:
            raise InterventionError(
                f"{leaves.describe(tensor)} cannot be written: safetensors has no such tensors"
            )
        name = str(len(self.named))
        self._names[id(tensor)] = name
        self._held.append(tensor)  # so that no other tensor gets its id
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        self.named[name] = plain.clone(memory_format=torch.contiguous_format)
        return name


class Vocabulary:
    """The actions that a file can name: the edits, and others.

    Args:
        makers: What makes the others, by their public names.
        made_by: Returns the public name of another action and its arguments; None if it is none.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[..., Any]],
        made_by: Callable[[Any], tuple[str, Mapping[str, Any]] | None],
    ) -> None:
        self.makers = {**_EDITS, **makers}
        self.made_by = made_by

    def written(self, action: Any, tensors: WrittenTensors) -> dict[str, Any]:
        """Return an action as JSON.

        Raises:
            InterventionError: It has no such form.
        """
        made = self.made_by(action)
        if isinstance(action, Edit) and action.arguments is not None:
            made = action.name.partition("(")[0], action.arguments
        if isinstance(action, Skip) and (action.passes_on or isinstance(action.value, Tensor)):
            made = "skip", {"value": action.value}
        if made is None:
            known = ", ".join(sorted(self.makers))
            raise InterventionError(
                f"{described(action)} cannot be written to a file, which holds no code; write it "
                f"with the actions of Kedge ({known}), with tensors in the place of functions, or "
                "attach it in the program that loads the file"
            )
        name, arguments = made
        return {
            "action": name,
            "arguments": {key: self._value(value, tensors) for key, value in arguments.items()},
        }

    def _value(self, value: Any, tensors: WrittenTensors) -> Any:
        """Return an argument as JSON."""
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, Tensor):
            return {
                "tensor": tensors.add(value),
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
            }
        if isinstance(value, Integral):
            return int(value)
        if isinstance(value, Real):
            number = float(value)
            if math.isfinite(number):
                return number
            return {"number": str(number)}
        if isinstance(value, complex):
            return {"complex": [self._value(value.real, tensors), self._value(value.imag, tensors)]}
        if isinstance(value, slice):
            parts = [value.start, value.stop, value.step]
            return {"slice": [self._value(part, tensors) for part in parts]}
        if isinstance(value, Mapping):
            return {"map": {str(key): self._value(each, tensors) for key, each in value.items()}}
        if isinstance(value, (list, tuple, range)):
            return [self._value(each, tensors) for each in value]
        if hasattr(value, "__array__"):
            return self._value(torch.as_tensor(value), tensors)
        return self.written(value, tensors)

    def read(self, entry: Any, tensors: Mapping[str, Tensor]) -> Any:
        """Return the action, or an argument, that JSON stands for.

        Raises:
            InterventionError: The JSON means nothing, or its tensors are others.
        """
        if entry is None or isinstance(entry, (bool, str, int, float)):
            return entry
        if isinstance(entry, list):
            return [self.read(each, tensors) for each in entry]
        if not isinstance(entry, dict):
            raise InterventionError(f"it holds {described(entry)}, which stands for nothing")
        if "tensor" in entry:
            return _tensor(entry, tensors)
        if "number" in entry:
            return float(entry["number"])
        if "complex" in entry:
            real, imaginary = self.read(entry["complex"], tensors)
            return complex(real, imaginary)
        if "slice" in entry:
            return slice(*self.read(entry["slice"], tensors))
        if "map" in entry:
            return {key: self.read(each, tensors) for key, each in entry["map"].items()}
        if "action" in entry:
            return self._action(entry, tensors)
        raise InterventionError(f"it holds an entry of {sorted(entry)}, which stands for nothing")

    def _action(self, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
        name = entry["action"]
        make = self.makers.get(name) if isinstance(name, str) else None
        if make is None:
            known = ", ".join(sorted(self.makers))
            raise InterventionError(
                f"it names the action {name!r}, which this version of Kedge has not; it has {known}"
            )
        given = entry.get("arguments")
        if not isinstance(given, dict):
            raise InterventionError(f"its action {name} has no arguments")
        arguments = {key: self.read(each, tensors) for key, each in given.items()}
        try:
            return make(**arguments)
        except (KedgeError, TypeError, ValueError) as error:
            raise InterventionError(f"its action {name} cannot be made: {error}") from error


def _tensor(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    found = tensors.get(entry["tensor"])
    if found is None:
        raise InterventionError(f"its tensor {entry['tensor']} is missing")
    wanted = f"{entry.get('dtype')}{entry.get('shape')}"
    there = f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)}"
    if wanted != there:
        raise InterventionError(
            f"its tensor {entry['tensor']} is {there}, and {wanted} was written; the file was changed"
        )
    return found
