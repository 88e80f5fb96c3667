"""What is not plain numbers in this process's memory is refused: never a wrong value, never a crash."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kedge import native
from kedge.actions.measure.host import HostTable
from kedge.native import reductions
from tests.native.ways import COMPILED, numbers

pytestmark = COMPILED


class Sub(Tensor):
    """A tensor that may mean something else."""


def conjugated() -> Tensor:
    """A tensor whose numbers are meant with another sign than they have in memory."""
    return torch.randn(6, dtype=torch.cfloat).conj()


def fake() -> Tensor:
    """A tensor without numbers."""
    with FakeTensorMode():
        return torch.empty(3)


def resized() -> Tensor:
    """A tensor whose memory was given back, as FSDP does."""
    x = torch.randn(100)
    x.untyped_storage().resize_(0)
    return x


def nested() -> Tensor:
    """Tensors of several lengths in one."""
    return torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])


KINDS: dict[str, Callable[[], object]] = {
    "a subclass": lambda: torch.randn(3).as_subclass(Sub),
    "conjugated": conjugated,
    "negated": lambda: conjugated().imag,
    "negated, contiguous": lambda: torch._neg_view(torch.randn(3)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "mkldnn": lambda: torch.randn(3, 3).to_mkldnn(),
    "nested": nested,
    "meta": lambda: torch.empty(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8),
    "zeros without memory": lambda: torch._efficientzerotensor(3),
    "fake": fake,
    "functional": lambda: torch._to_functional_tensor(torch.randn(3)),
    "without its memory": resized,
    "empty": lambda: torch.empty(0, 3),
    "whole numbers": lambda: torch.arange(3),
    "booleans": lambda: torch.ones(3, dtype=torch.bool),
    "eight bits": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "between two numbers": lambda: torch.frombuffer(
        bytearray(41), dtype=torch.float32, offset=1, count=10
    ),
    "None": lambda: None,
    "an array": lambda: np.ones(3),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_refused(kind: str) -> None:
    """Nothing is read, nothing is written, nothing raises."""
    value, rows, table = KINDS[kind](), native.table(1), HostTable()
    assert native.measure_into(rows, 0, value) == 0
    assert np.isnan(rows).all()
    assert native.measure_many(rows, 0, [value]) == ([] if value is None else [0])
    assert native.channels_above_zero(value, 0) is None
    assert table.observe(value, 0, native.AS_VALUE, native.CODES["full"], True) == native.REFUSED
    assert table.observe_all([0], [value], native.CODES["full"], draws=True) == [0]
    assert (table.used, np.isnan(table.rows).all(), table.buckets.any()) == (0, True, False)
    if value is not None:
        assert native.draw_many(np.zeros(256), [value], 256) == [0]


def test_what_a_transform_wraps_is_refused() -> None:
    """Inside `torch.func` a tensor has no memory of its own."""
    counts = []

    def seen(x: Tensor) -> Tensor:
        counts.append(native.measure_into(native.table(1), 0, x))
        return x.sum()

    torch.vmap(seen)(torch.randn(2, 3))
    torch.func.grad(seen)(torch.randn(3))
    torch.func.jvp(seen, (torch.randn(3),), (torch.ones(3),))
    torch.func.functionalize(seen)(torch.randn(3))
    assert counts == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "kind", ["conjugated", "negated", "negated, contiguous", "a subclass", "eight bits"]
)
def test_reductions_of_pytorch_measure_what_is_refused(kind: str) -> None:
    """What has numbers is measured all the same."""
    value = KINDS[kind]()
    assert isinstance(value, Tensor)
    x = numbers(value.as_subclass(Tensor))
    found = native.measure(value)
    assert found["sum"] == pytest.approx(x.sum(), rel=1e-6, abs=1e-6)
    assert (found["min"], found["max"], found["count"]) == (x.min(), x.max(), x.size)
    squares, nonfinite = native.all_finite_and_norm([value, torch.ones(4)])
    assert (squares, nonfinite) == (pytest.approx((x * x).sum() + 4), 0)


def test_parameters_and_inference_tensors_are_measured() -> None:
    """They are plain numbers."""
    with torch.inference_mode():
        inference = torch.ones(3)
    for value in (
        nn.Parameter(torch.ones(3)),
        nn.Buffer(torch.ones(3)),
        inference,
        torch.ones(3, requires_grad=True) * 1,
    ):
        assert native.measure_into(native.table(1), 0, value) == 3


def test_a_table_of_another_kind_is_an_error() -> None:
    """Rows are written only where there are rows."""
    x = torch.ones(3)
    for bad in (
        np.zeros((3, 6)),
        np.zeros((3, 7), np.float32),
        np.zeros((7, 3)).T,
        np.zeros(7),
        np.zeros((3, 7), "q"),
    ):
        with pytest.raises((ValueError, BufferError)):
            native.measure_into(bad, 0, x)
    for row in (-1, 3, 1 << 40):
        with pytest.raises(ValueError, match="rows"):
            native.measure_into(native.table(3), row, x)
    with pytest.raises(ValueError, match="rows 2 to 3"):
        native.measure_many(native.table(3), 2, [x, x])
    with pytest.raises(TypeError):
        native.measure_into(native.table(3), 0)
    with pytest.raises(ValueError, match="no instruction set"):
        native.use("abacus")
    readonly = native.table(1)
    readonly.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        native.measure_into(readonly, 0, x)


def test_many_values_have_a_row_each() -> None:
    """Gaps stay as they were; the indices of what was refused are returned."""
    rows = native.table(6)
    refused = native.measure_many(
        rows, 1, [torch.ones(2), None, conjugated(), torch.full((3,), 2.0)]
    )
    assert refused == [2]
    assert rows[:, 0] == pytest.approx([math.nan, 2, math.nan, math.nan, 6, math.nan], nan_ok=True)
    assert reductions.row(torch.ones(2))[0] == 2
