"""The arguments of a model: extracted from a batch, moved to a device, or narrowed to some samples."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def called_with(data: Any, left_out: Container[str] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as arguments: a dict holds keyword arguments, and the first entry of a tuple or list counts.

    Args:
        data: The batch.
        left_out: The entries of a dict that are no arguments.
    """
    if isinstance(data, Mapping):
        return (), {name: value for name, value in data.items() if name not in left_out}
    if isinstance(data, (tuple, list)) and len(data):
        return called_with(data[0])
    return (data,), {}


def given(made: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the result of a user's function as arguments: a tuple's are positional, a dict's are by keyword."""
    if isinstance(made, Mapping):
        return (), dict(made)
    return (made if isinstance(made, tuple) else (made,)), {}


def mapped(data: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch with its tensors and arrays changed."""
    if isinstance(data, (Tensor, np.ndarray)):
        return change(data)
    if isinstance(data, Mapping):
        return {key: mapped(value, change) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(mapped(value, change) for value in data))
    if isinstance(data, (tuple, list)):
        return type(data)(mapped(value, change) for value in data)
    return data


def moved(data: Any, device: torch.device | None) -> Any:
    """Return a batch with its tensors on a device; arrays become tensors."""

    def move(value: Any) -> Any:
        tensor = torch.as_tensor(value)
        return tensor if device is None else tensor.to(device, non_blocking=True)

    return mapped(data, move)


def narrowed(data: Any, rows: Sequence[int], size: int) -> Any:
    """Return some samples of a batch: rows of entries with one row per sample, and all other entries unchanged."""
    if isinstance(data, (Tensor, np.ndarray)):
        return data[list(rows)] if data.ndim and len(data) == size else data
    if isinstance(data, (list, tuple)) and len(data) == size and _is_of_samples(data):
        return type(data)(data[row] for row in rows)
    if isinstance(data, Mapping):
        return {key: narrowed(value, rows, size) for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        parts = [narrowed(value, rows, size) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    return data


def _is_of_samples(data: list[Any] | tuple[Any, ...]) -> bool:
    """Whether as many entries as there are samples are one for each; PyTorch collates texts to a tuple."""
    if isinstance(data, tuple):
        return all(isinstance(value, str) for value in data) and not hasattr(data, "_fields")
    return not any(isinstance(value, (Tensor, np.ndarray)) for value in data)


def size_of(data: Any) -> int | None:
    """Return the number of samples in a batch: the rows of its first tensor or array; None without one."""
    return next((len(value) for value in arrays(data) if value.ndim), None)


def arrays(data: Any) -> Iterator[Any]:
    """Yield the tensors and arrays of a batch."""
    if isinstance(data, (Tensor, np.ndarray)):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from arrays(value)
    elif isinstance(data, (tuple, list)):
        for value in data:
            yield from arrays(value)
