"""Values that do not lie in memory as they are indexed are read where they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.native.ways import Way, agree

FORMATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


@st.composite
def laid_out(draw: st.DrawFn) -> Tensor:
    """A view into a tensor: permuted, sliced with steps, expanded, unfolded."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    value = torch.randn(shape).to(draw(st.sampled_from(FORMATS)))
    value = value.permute(draw(st.permutations(range(value.dim()))))
    for dim, size in enumerate(value.shape):
        begin = draw(st.integers(0, size - 1))
        step = draw(st.integers(1, 3))
        value = value[(slice(None),) * dim + (slice(begin, None, step),)]
    if draw(st.booleans()):
        dim = draw(st.integers(0, value.dim()))
        value = value.unsqueeze(dim)
        value = value.expand(*value.shape[:dim], draw(st.integers(1, 4)), *value.shape[dim + 1 :])
    if draw(st.booleans()) and value.shape[-1] > 1:
        value = value.unfold(value.dim() - 1, 2, 1)
    return value


@given(value=laid_out())
@settings(
    max_examples=200, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_any_view_has_its_own_numbers_statistics(way: Way, value: Tensor) -> None:
    """Each number that indexing reaches is read as often as it is reached, and no other."""
    agree(way, value)


@pytest.mark.parametrize("dtype", FORMATS)
def test_common_layouts(way: Way, dtype: torch.dtype) -> None:
    """Transposed, channels last, parts of a fused projection, diagonals, and what `expand` repeats."""
    torch.manual_seed(1)
    x = torch.randn(130, 96).to(dtype)
    image = torch.randn(3, 8, 17, 19).to(dtype)
    for value in (
        x.t(), x[:, ::2], x[::3], x[:, 1:2], x[:, 5], x.diagonal(), x[:, :1].expand(-1, 50), x[:1].expand(70, -1),
        torch.ones((), dtype=dtype).expand(1000), *x.chunk(3, dim=1), image.to(memory_format=torch.channels_last),
        image.to(memory_format=torch.channels_last)[:, :5], image[:, :, 1:-1, 1:-1], image[:, 3], image.transpose(1, 3),
        image.unfold(2, 3, 2), image.movedim(1, -1),
    ):  # fmt: skip
        agree(way, value)


def test_a_large_view_is_read_in_spans(way: Way) -> None:
    """Spans begin anywhere in a view that is not contiguous."""
    x = torch.randn(700, 600)
    agree(way, x[:, 1:-1])
    agree(way, x.t()[::2])
