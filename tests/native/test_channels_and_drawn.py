"""Which channels are active, and the numbers that are drawn for a histogram."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from ways import COMPILED

from kedge import native
from kedge.actions import reduce
from kedge.actions.host import HostTable
from kedge.actions.table import bits
from kedge.store import exponents

pytestmark = COMPILED
FORMATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def above(value: Tensor, dim: int) -> bytes:
    """Find the active channels by PyTorch's reductions."""
    return bits(reduce.channels(value, dim).float().numpy())


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
    st.data(),
    st.sampled_from(FORMATS),
    st.floats(0, 1),
)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_a_channel_is_active_if_a_number_is_above_zero(shape, data, dtype, share) -> None:
    """Every channel is judged by all of its numbers, in every layout."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    value = torch.randn(shape).to(dtype)
    value = value.where(torch.rand(shape) < share * 0.2, -value.abs())
    value = value.permute(data.draw(st.permutations(range(value.dim()))))
    value = value[..., :: data.draw(st.integers(1, 2))]
    for dim in range(value.dim()):
        assert native.channels_above_zero(value, dim) == above(value, dim)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(64, 300), (1000, 33), (8, 40, 12, 12), (2, 70, 129), (4, 6, 5, 4, 3)])
def test_activations_of_layers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Vectors, images and sequences, channels last or not; dead, nearly dead and healthy channels."""
    for threshold in (-10.0, 0.0, 1.5, 3.0, 10.0):
        value = (torch.randn(shape) - threshold).relu().to(dtype)
        layouts = [value]
        if value.dim() == 4:
            layouts.append(value.to(memory_format=torch.channels_last))
        for one in layouts:
            assert native.channels_above_zero(one, 1) == above(one, 1)
        assert native.channels_above_zero(value, value.dim() - 1) == above(value, value.dim() - 1)


def test_what_counts_as_above_zero() -> None:
    """The smallest number and infinity do; zeros and NaN do not."""
    for dtype in FORMATS:
        tiny = torch.finfo(dtype).smallest_normal
        smallest = (
            torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)) if dtype.itemsize > 2 else tiny
        )
        x = torch.tensor([[float(smallest), tiny, math.inf, 1, 0.0, -0.0, math.nan, -math.inf, -1]], dtype=dtype)
        assert native.channels_above_zero(x, 1) == np.packbits([1, 1, 1, 1, 0, 0, 0, 0, 0]).tobytes()
    assert native.channels_above_zero(torch.tensor([[1.0, math.nan]]).t(), 1) == b"\x80"
    assert native.channels_above_zero(torch.ones(2, 3), 2) is None
    assert native.channels_above_zero(torch.ones(2, 3, dtype=torch.cfloat), 1) is None


@given(st.integers(1, 3000), st.sampled_from([*FORMATS, torch.complex64]))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_drawn_numbers_are_evenly_spread(size: int, dtype: torch.dtype) -> None:
    """They are those that PyTorch's slicing takes, at most 256, at a distance prime to their number."""
    value = torch.arange(size).to(dtype)
    table = HostTable()
    drawn(table, torch.ones(3))
    start, stop = drawn(table, value)
    flat = torch.view_as_real(value).reshape(-1) if value.is_complex() else value
    assert start == 3
    assert table.numbers[start:stop].tolist() == reduce.drawn(flat).float().tolist()


def test_views_are_drawn_from_too() -> None:
    """In the order in which they lie in memory; what is repeated is drawn from once."""
    x, table = torch.arange(5000.0).reshape(50, 100), HostTable()
    for value in (x.t(), x[:, :50], x[:, ::3], x.t()[3:]):
        numbers = table.numbers[slice(*drawn(table, value))]
        flat = value if value.is_contiguous() else value.t() if value.t().is_contiguous() else None
        assert 128 <= len(numbers) <= 256
        assert len(set(numbers)) == len(numbers)
        assert set(numbers.tolist()) <= set(value.flatten().tolist())
        if flat is not None:
            assert numbers.tolist() == reduce.drawn(flat.reshape(-1)).tolist()
    start, stop = drawn(table, torch.arange(3.0).expand(1000, 3))
    assert sorted(table.numbers[start:stop]) == [0, 1, 2]


def drawn(table: HostTable, value: Tensor) -> tuple[int, int]:
    """Take some elements of a value along; returns from where to where they are."""
    start = table.drawn
    table.take(0, value)
    return start, table.drawn


def test_room_for_drawn_numbers_is_checked() -> None:
    """Nothing is written beyond an array's end."""
    x = torch.ones(3)
    for room, start in ((np.zeros(255, np.float32), 0), (np.zeros(300, np.float32), 45), (np.zeros(256), 0)):
        with pytest.raises(ValueError, match="drawn numbers need room"):
            native.draw_into(room, start, x)
    with pytest.raises(ValueError, match="drawn numbers need room"):
        native.draw_into(np.zeros(256, np.float32), -1, x)


@given(st.lists(st.lists(st.floats(width=32), max_size=40), max_size=8))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_histograms_are_those_that_numpy_counts(runs: list[list[float]]) -> None:
    """Byte for byte, with zeros, subnormals, infinities and NaN in them."""
    numbers = np.array([x for run in runs for x in run], dtype=np.float32)
    ends = np.cumsum([len(run) for run in runs], dtype=np.intp)
    spans = (
        np.column_stack([np.concatenate([[0], ends[:-1]]), ends]).astype(np.intp) if runs else np.zeros((0, 2), np.intp)
    )
    one_by_one = [
        exponents.encode(exponents.count(np.array([run], dtype=np.float32).reshape(1, -1))[0]) for run in runs
    ]
    assert native.histograms is not None
    assert native.histograms(numbers, ends.tolist()) == one_by_one
    assert exponents.encode_all(exponents.count_runs(numbers, spans)) == one_by_one
    with pytest.raises(ValueError, match="ends at"):
        native.histograms(numbers, [len(numbers) + 1])


@pytest.mark.parametrize("dtype", FORMATS)
def test_many_are_drawn_from_one_after_another(dtype: torch.dtype) -> None:
    """Those that PyTorch's slicing takes, in float64; what is refused gives none, and room is checked."""
    tensors = [torch.randn(n, dtype=torch.float64).to(dtype) for n in (1, 7, 100, 5000)]
    numbers = np.zeros(5 * 64)
    counts = native.draw_many(numbers, [*tensors[:2], torch.ones(3, dtype=torch.int64), *tensors[2:]], 64)
    expected = [x[:: exponents.spacing(x.numel(), 64)].double() for x in tensors]
    assert counts == [1, 7, 0, *(len(x) for x in expected[2:])]
    assert numbers[: sum(counts)].tolist() == torch.cat(expected).tolist()
    with pytest.raises(ValueError, match="room for 4 times 64"):
        native.draw_many(np.zeros(4 * 64 - 1), tensors, 64)
