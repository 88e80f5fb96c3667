"""Kernels of PyTorch's that take many tensors at once."""

from __future__ import annotations

import pytest
import torch

from kedge.torch_internals import kernels


@pytest.mark.parametrize(
    "others", [(), (torch.float32, torch.bfloat16)], ids=["alone", "with others"]
)
def test_tensors_in_float64_have_norms(others: tuple[torch.dtype, ...]) -> None:
    """PyTorch refuses to sum them up in float32, on every device."""
    values = [torch.full((4,), 3.0, dtype=dtype) for dtype in (*others, torch.float64)]
    assert [float(norm) for norm in kernels.norms(values)] == [6.0] * len(values)
