"""The ways in which a value can be measured, and the reference that all are held to."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kedge import native
from kedge.native import on_device, reductions

COMPILED = pytest.mark.skipif(
    not native.available(), reason=f"the compiled part is missing: {native.why_not()}"
)


@dataclass(frozen=True)
class Bound:
    """By how much sums may be wrong, as a share of the sum of magnitudes."""

    float64: float
    other: float


@dataclass(frozen=True)
class Way:
    """One way to measure a value."""

    name: str
    measure: Callable[[Tensor], dict[str, float]]
    bound: Bound
    most: int = 1 << 40
    """The size of the largest value that it measures in reasonable time."""


def compiled(tensor: Tensor) -> dict[str, float]:
    """Measure by the compiled part, which must not refuse."""
    rows = native.table(3)
    count = native.measure_into(rows, 1, tensor)
    assert count == rows[1, -1], "refused"
    assert np.isnan(rows[[0, 2]]).all(), "other rows were written"
    return dict(zip(native.FIELDS, rows[1].tolist(), strict=True))


def by_pytorch(tensor: Tensor) -> dict[str, float]:
    """Measure by PyTorch's reductions."""
    return dict(zip(native.FIELDS, reductions.row(tensor), strict=True))


def by_triton(tensor: Tensor, rows_dtype: torch.dtype = torch.float64) -> dict[str, float]:
    """Measure by the Triton kernel, in Triton's interpreter."""
    kernel = importlib.import_module("kedge.native.device_kernel").statistics
    flat = reductions.flat(tensor).contiguous()
    programs = on_device.rows_for(flat.numel())
    table = torch.full((programs + 2, 7), math.nan, dtype=rows_dtype)
    with np.errstate(all="ignore"):
        kernel[(programs,)](flat, table, 1, flat.numel(), native.CODES["full"], num_warps=4)
    assert table[[0, -1]].isnan().all(), "other rows were written"
    row = on_device.folded(table.numpy(), [1], [programs])[0].tolist()
    return dict(zip(native.FIELDS, [*row, flat.numel()], strict=True))


PYTORCH = Way("pytorch", by_pytorch, Bound(2**-30, 2**-12))
TRITON = Way("triton", by_triton, Bound(2**-40, 2**-21), most=1 << 20)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton runs kernels on the host in this process, which is decided when it is imported."""


def numbers(tensor: Tensor) -> np.ndarray:
    """Return all real numbers of a tensor in float64."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return plain.detach().resolve_neg().double().numpy().ravel()


def agree(way: Way, tensor: Tensor) -> None:
    """Hold what a way measures to what float64 gives."""
    found, x = way.measure(tensor), numbers(tensor)
    precision = torch.empty(0, dtype=tensor.dtype).real.dtype
    bound = way.bound.float64 if precision is torch.float64 else way.bound.other
    finite = np.isfinite(x)
    assert found["count"] == x.size
    assert found["nonzero"] == np.count_nonzero(x)
    assert found["nonfinite"] == np.count_nonzero(~finite)
    assert found["nan"] == np.count_nonzero(np.isnan(x))
    with np.errstate(all="ignore"):
        assert found["min"] == pytest.approx(x.min(), rel=0, abs=0, nan_ok=True)
        assert found["max"] == pytest.approx(x.max(), rel=0, abs=0, nan_ok=True)
        if finite.all():
            sum_, size, squares = math.fsum(x), math.fsum(np.abs(x)), math.fsum(x * x)
            assert abs(found["sum"] - sum_) <= bound * size
            assert abs(found["sumsq"] - squares) <= bound * squares
        else:
            assert found["sum"] == pytest.approx(x.sum(), nan_ok=True)
            assert found["sumsq"] == pytest.approx((x * x).sum(), nan_ok=True)
