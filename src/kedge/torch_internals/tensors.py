"""Properties of a tensor besides its values: its version, its base, and this process's part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kedge.torch_internals.corners import find, lacks


def _changes(value: Tensor) -> int:
    return value._version


def _not_counted(_: Tensor) -> int:
    raise RuntimeError("this PyTorch does not count the changes of tensors")


changes: Callable[[Tensor], int] = _not_counted if lacks("versions") else _changes
"""How often a tensor's memory was changed in place; raises RuntimeError where PyTorch does not count."""


def _counted(value: Tensor) -> int:
    try:
        return value._version
    except RuntimeError:  # of an inference tensor
        return -1
    except AttributeError:  # of None: a call without tensors
        return -1


def _never(_: Tensor) -> int:
    return -1


version_of: Callable[[Tensor], int] = _never if lacks("versions") else _counted
"""How often a tensor's memory was changed in place; -1 where PyTorch does not count."""


def _base(value: Tensor) -> Tensor | None:
    return value._base


def _no_base(_: Tensor) -> Tensor | None:
    return None


def _always(_: Tensor) -> bool:
    return True


base_of: Callable[[Tensor], Tensor | None] = _no_base if lacks("aliases") else _base
"""The tensor of which another one is a view, for autograd; None if it is not a view."""

may_alias: Callable[[Tensor], bool] = _always if lacks("aliases") else find("torch:Tensor._is_view")
"""Whether a tensor shares its memory with the one that it was made of, or may share it."""


def _root(value: Tensor) -> Tensor:
    base = value._base
    if base is None:
        return value
    return base


def _itself(value: Tensor) -> Tensor:
    return value


root_of: Callable[[Tensor], Tensor] = _itself if lacks("aliases") else _root
"""The base of a view; any other tensor itself."""


def _has_no_memory(value: Tensor) -> bool:
    try:
        return value.numel() > 0 and not value.untyped_storage().data_ptr()
    except RuntimeError:  # there is no address
        return True


is_only_zeros: Callable[[Tensor], bool] = find("torch:Tensor._is_zerotensor") or _has_no_memory
"""Whether a tensor is zeros without memory."""


def part_here(value: Any) -> Tensor | None:
    """Return this process's part of a distributed tensor; None if it is not distributed."""
    part = getattr(value, "_local_tensor", None)
    if part is None:
        local = getattr(value, "to_local", None)
        if callable(local):
            with torch.no_grad():
                part = local()
    if not isinstance(part, Tensor):
        return None
    return part


def is_sharded(parameter: Tensor) -> bool:
    """Whether the memory of a parameter comes and goes, as for one that is distributed over several processes."""
    return hasattr(parameter, "to_local") or bool(getattr(parameter, "_is_flat_param", False))


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits; a NaN is equal to itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(value: Tensor) -> Tensor:
    own = value.detach().resolve_conj().resolve_neg()
    return own.reshape(-1).contiguous().view(torch.uint8)
