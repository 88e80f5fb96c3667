"""What a tensor was, in few words: its numbers if they are few, else their range."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kedge.store.events import TensorValue
from kedge.torch_internals import accelerators, modes

_FEW = 6
"""Most numbers that are listed."""
_MOST = 1_000_000
"""Most numbers that are read."""
_SMALL = {getattr(torch, name) for name in dir(torch) if name.startswith("float8_")}
"""Types that PyTorch converts and does not count with."""


def value_of(tensor: Tensor) -> TensorValue:
    """Return what a tensor is now.

    Numbers are not read where there are none, where reading would end the capture of a device's
    graph or run code of the tensor's class, or where they are too many.
    """
    shape = tuple(map(int, tensor.shape)) if not tensor.is_nested else ()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not _is_readable(tensor):
        return TensorValue(shape=shape, dtype=dtype)
    try:
        text, nonfinite = _told(tensor)
    except NotImplementedError:  # PyTorch does not count with numbers of this type
        return TensorValue(shape=shape, dtype=dtype)
    return TensorValue(shape=shape, dtype=dtype, text=text, nonfinite=nonfinite)


def _told(tensor: Tensor) -> tuple[str, int]:
    """Return what is said of a tensor's numbers, and how many of them are not finite."""
    with torch.no_grad():
        numbers = tensor.detach()
        if numbers.dtype in _SMALL:
            numbers = numbers.float()
        nonfinite = 0
        if numbers.is_floating_point() or numbers.is_complex():
            nonfinite = numbers.numel() - int(numbers.isfinite().sum())
        if numbers.numel() <= _FEW:
            return _listed(numbers.tolist()), nonfinite
        return _range(numbers, nonfinite), nonfinite


def _is_readable(tensor: Tensor) -> bool:
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    if modes.is_dispatched(tensor) or "bits" in str(tensor.dtype):
        return False
    if modes.is_wrapped(tensor) or not modes.has_data(tensor) or tensor.numel() > _MOST:
        return False
    return tensor.is_cpu or not accelerators.is_capturing()


def _listed(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_listed, value))}]"
    if isinstance(value, complex):
        imaginary = _figure(value.imag)
        sign = "" if imaginary.startswith("-") else "+"
        return f"{_figure(value.real)}{sign}{imaginary}j"
    if isinstance(value, float):
        return _figure(value)
    return str(value)


def _figure(value: float) -> str:
    return f"{value:.4g}"


def _range(numbers: Tensor, nonfinite: int) -> str:
    if numbers.is_complex():
        return f"sizes {_range(numbers.abs(), nonfinite)}"
    known = numbers.double().flatten()
    if nonfinite:
        known = known[known.isfinite()]
    if not known.numel():
        return "none finite"
    low, high = (bound.item() for bound in known.aminmax())
    return f"{_figure(low)}..{_figure(high)}, mean {_figure(known.mean().item())}"
