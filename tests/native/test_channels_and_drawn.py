"""Which channels are active, and the numbers that are drawn for a histogram."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kedge import native
from kedge.actions.measure import reduce
from kedge.actions.measure.host import HostTable, bits
from kedge.actions.measure.saturation import saturation
from kedge.store import exponents
from tests.native.ways import COMPILED
from tests.store.histograms import count

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
@pytest.mark.parametrize(
    "shape", [(64, 300), (1000, 33), (8, 40, 12, 12), (2, 70, 129), (4, 6, 5, 4, 3)]
)
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
            torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype))
            if dtype.itemsize > 2
            else tiny
        )
        x = torch.tensor(
            [[float(smallest), tiny, math.inf, 1, 0.0, -0.0, math.nan, -math.inf, -1]], dtype=dtype
        )
        assert (
            native.channels_above_zero(x, 1) == np.packbits([1, 1, 1, 1, 0, 0, 0, 0, 0]).tobytes()
        )
    assert native.channels_above_zero(torch.tensor([[1.0, math.nan]]).t(), 1) == b"\x80"
    assert native.channels_above_zero(torch.ones(2, 3), 2) is None
    assert native.channels_above_zero(torch.ones(2, 3, dtype=torch.cfloat), 1) is None


@given(st.integers(1, 3000), st.sampled_from([*FORMATS, torch.complex64]))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_drawn_numbers_are_evenly_spread(size: int, dtype: torch.dtype) -> None:
    """They are those that PyTorch's slicing takes, at most 256, at a distance prime to their number."""
    value = torch.arange(size).to(dtype)
    flat = torch.view_as_real(value).reshape(-1) if value.is_complex() else value
    assert drawn(value) == reduce.drawn(flat).float().tolist()


def test_views_are_drawn_from_too() -> None:
    """In the order in which they lie in memory; what is repeated is drawn from once."""
    x = torch.arange(5000.0).reshape(50, 100)
    for value in (x.t(), x[:, :50], x[:, ::3], x.t()[3:]):
        numbers = drawn(value)
        flat = value if value.is_contiguous() else value.t() if value.t().is_contiguous() else None
        assert 128 <= len(numbers) <= 256
        assert len(set(numbers)) == len(numbers)
        assert set(numbers) <= set(value.flatten().tolist())
        if flat is not None:
            assert numbers == reduce.drawn(flat.reshape(-1)).tolist()
    assert sorted(drawn(torch.arange(3.0).expand(1000, 3))) == [0, 1, 2]


def drawn(value: Tensor) -> list[float]:
    """The numbers that are drawn from a value."""
    numbers = np.zeros(native.DRAWN, np.float32)
    (count,) = native.draw_many(numbers, [value], native.DRAWN)
    return numbers[:count].tolist()


@given(st.lists(st.lists(st.floats(width=32), min_size=1, max_size=300), max_size=8))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_histograms_are_those_that_numpy_counts(values: list[list[float]]) -> None:
    """Byte for byte, with zeros, subnormals, infinities and NaN in them; and so are those of a device's numbers."""
    tensors = [torch.tensor(value, dtype=torch.float32) for value in values]
    taken = [reduce.drawn(tensor).numpy() for tensor in tensors]
    one_by_one = [exponents.encode(count(some[None])[0]) for some in taken]
    table = HostTable()
    for i, tensor in enumerate(tensors):
        assert (
            table.observe(tensor, i, native.AS_VALUE, native.CODES["full"], True)
            == native.DONE | native.FRESH
        )
    part = table.end()
    assert part.histograms == one_by_one
    assert part.sampled.tolist() == [len(some) for some in taken]
    ends = np.cumsum([0, *map(len, taken)], dtype=np.intp)
    numbers = np.concatenate([*taken, np.zeros(0, np.float32)])
    assert (
        exponents.encode_all(exponents.count_runs(numbers, np.column_stack([ends[:-1], ends[1:]])))
        == one_by_one
    )


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=300),
    st.sampled_from(["tanh", "sigmoid", "softsign"]),
)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_saturated_outputs_are_counted_among_the_drawn(value: list[float], how: str) -> None:
    """At the site that saturates, and as numpy counts them."""
    tensor, activation, table = (
        torch.tensor(value, dtype=torch.float32),
        saturation(how),
        HostTable(),
    )
    table.saturates(7, activation)
    for site in (7, 3):
        table.observe(tensor.clone(), site, native.AS_VALUE, native.CODES["full"], True)
    assert table.end().saturated.tolist() == [activation.count(reduce.drawn(tensor).numpy()), -1]


@pytest.mark.parametrize("numbers", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", FORMATS)
def test_many_are_drawn_from_one_after_another(
    dtype: torch.dtype, numbers: type[np.floating]
) -> None:
    """Those that PyTorch's slicing takes; what is refused gives none, and room is checked."""
    tensors = [torch.randn(n, dtype=torch.float64).to(dtype) for n in (1, 7, 100, 5000)]
    array = np.zeros(5 * 64, numbers)
    counts = native.draw_many(
        array, [*tensors[:2], torch.ones(3, dtype=torch.int64), *tensors[2:]], 64
    )
    expected = [x[:: exponents.spacing(x.numel(), 64)].double() for x in tensors]
    assert counts == [1, 7, 0, *(len(x) for x in expected[2:])]
    assert array[: sum(counts)].tolist() == torch.cat(expected).numpy().astype(numbers).tolist()
    with pytest.raises(ValueError, match="room for 4 times 64"):
        native.draw_many(np.zeros(4 * 64 - 1, numbers), tensors, 64)


def test_changes_are_those_of_the_numbers_that_were_drawn() -> None:
    """Of each tensor the sum of their squares, exactly."""
    tensors = [torch.randn(n) for n in (3, 5000)]
    before = np.zeros(2 * 64, np.float32)
    drawn = native.draw_many(before, tensors, 64)
    was = [x[:: exponents.spacing(x.numel(), 64)].clone() for x in tensors]
    for x in tensors:
        x.add_(0.5)
    counts, squares = native.squared_changes(before, tensors, drawn, 64)
    changes = [
        (x[:: exponents.spacing(x.numel(), 64)].double() - w.double())
        for x, w in zip(tensors, was, strict=True)
    ]
    assert counts == [len(change) for change in changes]
    assert squares == pytest.approx([float(change.square().sum()) for change in changes], rel=1e-12)
    with pytest.raises(ValueError, match="fewer numbers"):
        native.squared_changes(before[:60], tensors, drawn, 64)
    with pytest.raises(ValueError, match="needs the count"):
        native.squared_changes(before, tensors, drawn[:1], 64)
    tensors[0].resize_(7)
    counts, again = native.squared_changes(before, tensors, drawn, 64)
    assert (counts, again[1]) == ([0, drawn[1]], squares[1])
    assert math.isnan(again[0])
