"""The tensors inside structured values: finding them by name and putting others in their place.

Modules take and return tensors, tuples, lists, dicts, named tuples, dataclasses, and containers
that a library has registered with torch's pytree. A leaf's name joins keys, fields and indices
with dots: ``logits``, ``0``, ``cache.1``; the name of a bare tensor is empty. If an earlier one in
a dict has the name already, as in ``{0: a, "0": b}``, the type of the key is added: ``0@str``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from kedge.torch_internals import containers, modes
from kedge.torch_internals.storages import identity_of
from kedge.torch_internals.tensors import part_here


def find(value: Any, prefix: str = "") -> list[tuple[str, Tensor]]:
    """Return every tensor in a value with its name, in the value's own order."""
    if isinstance(value, Tensor):
        return [(prefix, value)]
    found = []
    for key, child in _children(value):
        name = f"{prefix}.{key}" if prefix else key
        found += find(child, name)
    return found


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(name, value[key]) for name, key in _names(value).items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return [(str(i), v) for i, v in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            (f.name, getattr(value, f.name))
            for f in dataclasses.fields(value)
            if hasattr(value, f.name)
        ]
    if containers.is_registered(value):
        children, _ = containers.apart(value)
        return [(str(i), v) for i, v in enumerate(children)]
    return []


def _names(value: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the keys of a mapping by their names, no two of which lead to leaves of one name."""
    keys: dict[str, Any] = {}
    above: set[str] = set()
    for key in value:
        name = str(key)
        while name in keys or (
            ("." in name or name in above) and _is_taken(name, key, keys, value)
        ):
            name = f"{name}@{type(key).__name__}"
        keys[name] = key
        above.update(_prefixes(name))
    return keys


def _prefixes(name: str) -> list[str]:
    if "." not in name:
        return []
    return [name[:at] for at, letter in enumerate(name) if letter == "."]


def _is_taken(name: str, key: Any, keys: Mapping[str, Any], value: Mapping[Any, Any]) -> bool:
    """Whether a leaf under a name would have the name of one under another.

    As ``a.b`` and ``b`` inside of ``a``.
    """
    near = [other for other in keys if other.startswith(f"{name}.")]
    near += [other for other in _prefixes(name) if other in keys]
    if not near:
        return False

    own = {leaf for leaf, _ in find(value[key], name)}
    for other in near:
        others = {leaf for leaf, _ in find(value[keys[other]], other)}
        if own & others:
            return True
    return False


def put(value: Any, new: Mapping[str, Tensor], prefix: str = "") -> Any:
    """Return the value with some of its tensors replaced, by name.

    The given value is not changed.
    """
    if isinstance(value, Tensor):
        return new.get(prefix, value)
    changed = {}
    for key, child in _children(value):
        name = f"{prefix}.{key}" if prefix else key
        if any(n == name or n.startswith(name + ".") for n in new):
            changed[key] = put(child, new, name)
    if not changed:
        return value
    return _with(value, changed)


def _with(value: Any, changed: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        make: Any = type(value)
        # Dynamo can read these two; others may have a state of their own.
        plain = make in (dict, OrderedDict)
        twin: Any = make(value) if plain else copy.copy(value)
        for name, key in _names(value).items():
            if name in changed:
                twin[key] = changed[name]
        return twin
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(changed.get(name, old) for name, old in _children(value)))
    if isinstance(value, (list, tuple)):
        items = [changed.get(str(i), v) for i, v in enumerate(value)]
        if type(value) is list:
            return items
        return type(value)(items)
    if dataclasses.is_dataclass(value):
        twin = copy.copy(value)
        for name, child in changed.items():
            object.__setattr__(twin, name, child)
        return twin
    children, context = containers.apart(value)
    items = [changed.get(str(i), v) for i, v in enumerate(children)]
    return containers.together(value, items, context)


def describe(value: Any) -> str:
    """Return a short description of a value for messages: type, and shape or leaves."""
    if isinstance(value, Tensor):
        try:
            dtype = str(value.dtype).removeprefix("torch.")
            return f"{dtype}{list(shape_of(value))}"
        except Exception:  # noqa: BLE001 - the program's subclass answers for these
            return type(value).__name__
    names = [f"[{name}]" for name, _ in find(value)]
    inside = ", ".join(names[:8]) or "no tensor"
    if len(names) > 8:
        inside += ", ..."
    return f"{type(value).__name__} with {inside}"


def shape_of(value: Tensor) -> tuple[Any, ...]:
    """Return a tensor's shape; for a nested tensor that of each part."""
    if value.is_nested and value.layout is torch.strided:
        return tuple(tuple(part.shape) for part in value.detach().unbind())
    return tuple(value.shape)


def own_part(value: Tensor) -> Tensor:
    """Return this process's part of a distributed tensor, such as a DTensor; any other tensor itself.

    Reading the whole would make the processes communicate, at a time that is not the same for all.
    """
    if type(value) is Tensor or type(value) is Parameter:
        return value
    part = part_here(value)
    return part if part is not None else value


def untransformed(value: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of `torch.func`: under ``vmap`` the values of all samples."""
    while modes.is_wrapped(value):
        value = modes.unwrapped(value)
    return value


def dequantized(value: Tensor) -> Tensor:
    """Return the numbers that a quantized tensor stands for.

    Of any other tensor itself.
    """
    if value.is_quantized:
        return value.dequantize()
    return value


class Numbers(NamedTuple):
    """The numbers that a value holds.

    Attributes:
        stored: Those that it stores, as a dense tensor of any shape.
        zeros: How many more there are, which are zero: those that a sparse tensor leaves out.
    """

    stored: Tensor
    zeros: int = 0


def numbers_of(value: Tensor) -> Numbers | None:
    """Return the numbers that a tensor of any kind stands for, detached unless it is dense; None if it has no data.

    Of a nested tensor these are its parts, without the gaps between them; of a masked one those
    that the mask lets through.
    """
    value = dequantized(value)
    if not modes.has_data(value):
        return None
    if value.is_nested:
        parts = [part.reshape(-1) for part in value.detach().unbind()]
        if parts:
            return Numbers(torch.cat(parts))
        return Numbers(torch.empty(0, dtype=value.dtype, device=value.device))
    if value.layout is torch.strided:
        if type(value) is Tensor:
            return Numbers(value)
        masked: Any = value
        mask = getattr(masked, "get_mask", None)
        if not callable(mask):
            return Numbers(value)
        return Numbers(masked.get_data().detach()[mask()])
    if value.layout is torch.sparse_coo:
        stored = value.detach().coalesce().values()
    elif value.layout in COMPRESSED:
        stored = value.detach().values()
    else:
        return Numbers(value.detach().to_dense())
    return Numbers(stored, value.numel() - stored.numel())


COMPRESSED = frozenset(
    {
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    }
)
"""The layouts of sparse tensors that have the indices of rows, or of columns, compressed."""


def has_memory(value: Tensor) -> bool:
    """Whether a dense tensor has memory for its elements; reading one whose memory was freed ends the process.

    Sharded training frees the gathered parameters between a module's forward and its backward.
    """
    if not value.numel():
        return True
    last = value.storage_offset()
    for size, step in zip(value.shape, value.stride(), strict=True):
        last += (size - 1) * step
    try:
        return value.untyped_storage().nbytes() >= (last + 1) * value.element_size()
    except (NotImplementedError, RuntimeError):  # a library's own kind of tensor
        return False


def storage_of(value: Tensor) -> int:
    """Return a number that identifies a tensor's storage.

    -1 if it has no ordinary storage.
    """
    try:
        return int(identity_of(untransformed(value).untyped_storage()))
    except (NotImplementedError, RuntimeError):  # sparse, or a library's own kind
        return -1
