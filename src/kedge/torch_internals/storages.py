"""The plain tensors behind a tensor, inside all its wrappers, and their storages."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kedge.torch_internals import modes
from kedge.torch_internals.corners import find, lacks
from kedge.torch_internals.module_tables import buffers_in, parameters_in

_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
_unaddressed = itertools.count(1 << 64)


def _no(_: Any) -> bool:
    return False


_is_wrapper: Callable[[Any], bool] = (
    find("torch.utils._python_dispatch:is_traceable_wrapper_subclass") or _no
)


def _number(storage: torch.UntypedStorage) -> int:
    return storage._cdata  # type: ignore[no-any-return]


def _address(storage: torch.UntypedStorage) -> int:
    return storage.data_ptr() or next(_unaddressed)


identity_of: Callable[[torch.UntypedStorage], int] = _address if lacks("storages") else _number
"""A number that no other living storage has."""


def parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that a tensor consists of.

    An ordinary one itself; indices and values of a sparse one; the tensors inside a subclass such
    as DTensor, or inside the wrapper of a `torch.func` transform.
    """
    if modes.is_wrapped(tensor):
        return parts(modes.unwrapped(tensor))
    wrapper: Any = tensor
    if _is_wrapper(wrapper):
        found: list[Tensor] = []
        for name in wrapper.__tensor_flatten__()[0]:
            held = getattr(wrapper, name)
            if isinstance(held, Tensor):  # a DTensor names its mesh too
                found += parts(held)
        return found
    if tensor.layout == torch.sparse_coo:
        return _of_sparse(tensor)
    if tensor.layout in _ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in _COLUMNS:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout == torch.strided:
        return [tensor]
    return []


def _of_sparse(tensor: Tensor) -> list[Tensor]:
    """Return indices and values of a sparse tensor, which may hold an index several times."""
    if hasattr(tensor, "_indices") and hasattr(tensor, "_values"):
        return [tensor._indices(), tensor._values()]
    if not tensor.is_coalesced():
        return []
    return [tensor.indices(), tensor.values()]


def storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of tensors by their identity, each once; a lazy parameter has none yet."""
    found = {}
    for tensor in tensors:
        if is_lazy(tensor):
            continue
        for part in parts(tensor):
            storage = part.untyped_storage()
            found[identity_of(storage)] = storage
    return found


def users_of(storage: torch.UntypedStorage) -> int:
    """Return the number of holders of a storage, the caller included; a large one if not known."""
    count = find("torch:_C._storage_Use_Count")
    if count is None or lacks("storages"):
        return sys.maxsize
    return int(count(identity_of(storage)))


def behind(pointer: Any) -> torch.UntypedStorage | None:
    """Return the storage of a weak reference; None if it is gone or not available."""
    make: Any = find("torch:UntypedStorage._new_with_weak_ptr")
    if make is None:
        return None
    found: torch.UntypedStorage | None = make(pointer)
    return found


def owned(module: nn.Module) -> dict[int, torch.UntypedStorage]:
    """Return the storages of a module's parameters and buffers."""
    return storages([*parameters_in(module).values(), *buffers_in(module).values()])
