"""Masks, noise and indices in the bits that they need, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from kedge.offload.rebuild import find
from kedge.offload.rebuild.by_content import (
    expand,
    narrow,
    pack,
    pack_there,
    unpack,
    unpack_there,
)
from tests.offload.rebuild.rebuilding import Engine, same_bits


def by_content(value):
    """What a tensor without a graph is rebuilt as, and in how many bytes; None if it is kept."""
    recipe = find(value, lambda saved: None)
    return None if recipe is None else (recipe.run(), recipe.nbytes, recipe.rule)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_noise_is_stored_in_one_bit(dtype):
    """Dropout's noise on a CPU, two values in full width, is stored in a bit each, whatever its size and layout."""
    torch.manual_seed(0)
    for shape, layout in (
        ((3, 5, 7, 11), torch.channels_last),
        ((1000, 131), None),
        ((70_001,), None),
    ):
        noise = F.dropout(torch.ones(shape, dtype=dtype), 0.3)
        noise = noise if layout is None else noise.to(memory_format=layout)
        made, nbytes, rule = by_content(noise)

        assert rule == "two_values"
        assert nbytes == (noise.numel() + 7) // 8
        assert same_bits(made, noise)


def test_two_values_may_be_any():
    """Masks of attention hold 0 and minus infinity; NaN and the zero with a sign are values like others, by their bits."""
    for low, high in ((0.0, float("-inf")), (-0.0, 0.0), (float("nan"), 1.0)):
        mask = torch.where(torch.rand(500) < 0.5, low, high)
        made, _, _ = by_content(mask)

        assert same_bits(made, mask)


def test_a_third_value_is_seen_wherever_it_is():
    """A tensor with a third value, even the last of all or only in the sign of a zero, is not taken for a mask."""
    for place, third in ((-1, 0.5), (99_999, float("nan")), (70_000, -0.0)):
        mask = (torch.rand(100_003) < 0.5).float()
        mask[place] = third

        assert by_content(mask) is None
    assert by_content(torch.randn(5000)) is None
    assert by_content(torch.ones(5000)) is None


def test_booleans_are_stored_in_one_bit():
    """A mask is stored in an eighth of its bytes, transposed ones with their strides."""
    for mask in (
        torch.rand(13, 17) < 0.5,
        (torch.rand(16, 9) < 0.1).t(),
        torch.zeros(3, dtype=torch.bool),
    ):
        made, nbytes, rule = by_content(mask)

        assert rule == "bits"
        assert nbytes == (mask.numel() + 7) // 8
        assert same_bits(made, mask)


@pytest.mark.parametrize("size", [0, 1, 8, 1003])
def test_packing_is_the_same_without_numpy(size):
    """Devices that NumPy does not reach pack and unpack by tensor operations, into the same bytes."""
    mask = torch.rand(size) < 0.4
    bits = pack(mask)

    assert torch.equal(pack_there(mask), bits)
    assert torch.equal(unpack(bits, size), mask)
    assert torch.equal(unpack_there(bits, size), mask)


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_pool_indices_are_stored_in_a_byte(layout, ceil):
    """The 64-bit indices of pooling are stored in 8 bits, with padding, dilation and last windows that are cut."""
    torch.manual_seed(0)
    for size, options in (
        ((4, 8, 112, 112), {"kernel_size": 3, "stride": 2, "padding": 1}),
        ((2, 4, 224, 224), {"kernel_size": 3, "stride": 2, "padding": 1}),
        (
            (2, 4, 61, 50),
            {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 1), "dilation": (2, 1)},
        ),
        ((3, 5, 32, 32), {"kernel_size": 2}),
    ):
        x = torch.randn(size).to(memory_format=layout)
        _, indices = F.max_pool2d(x, **options, ceil_mode=ceil, return_indices=True)
        made, nbytes, rule = by_content(indices)

        assert rule == "narrow_integers"
        assert nbytes == indices.numel()
        assert same_bits(made, indices)


def test_pools_of_one_and_three_dimensions():
    """Pooling along a line and in space as well."""
    torch.manual_seed(0)
    for indices in (
        F.max_pool1d(torch.randn(8, 16, 500), 3, 2, 1, return_indices=True)[1],
        F.max_pool3d(torch.randn(2, 4, 12, 14, 18), 3, 2, 1, return_indices=True)[1],
        F.adaptive_max_pool2d(torch.randn(4, 8, 30, 30), 7, return_indices=True)[1],
    ):
        made, nbytes, _ = by_content(indices)

        assert nbytes <= indices.numel() * 2
        assert same_bits(made, indices)


@settings(max_examples=200, deadline=None)
@example(values=[0, 2**29], wide=False)  # a step that is too long for its ramp
@given(
    values=st.lists(
        st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 300) | st.integers(0, 70_000),
        min_size=1,
        max_size=64,
    ),
    wide=st.booleans(),
)
def test_any_integers_come_back(values, wide):
    """Whatever the integers, and however large: they come back as they are, or are kept."""
    whole = torch.tensor(values, dtype=torch.int64)
    whole = whole.reshape(2, -1) if wide and len(values) % 2 == 0 else whole
    found = narrow(whole)

    assert found is None or torch.equal(expand(found[1], found[0]), whole)
    assert found is None or found[0].element_size() <= 4


def test_indices_and_masks_in_a_graph():
    """Gradients through masks, pools and dropout are those without hooks, with everything that can be rebuilt rebuilt."""

    def run(engine):
        torch.manual_seed(0)
        x = torch.randn(4, 8, 30, 30, requires_grad=True)
        h = F.max_pool2d(F.dropout(x * 2, 0.2), 3, 2, 1)
        h = h.masked_fill(torch.rand_like(h) < 0.5, 0)
        torch.where(torch.rand_like(h) < 0.5, h, h * 2).square().sum().backward()
        return x.grad

    plain = run(None)
    engine = Engine(least=1, check=True)
    with engine.in_force():
        found = run(engine)

    assert engine.rebuilt["bits"] == 2
    assert engine.rebuilt["two_values"] == engine.rebuilt["narrow_integers"] == 1
    assert same_bits(found, plain)
