"""Digests of a tensor's bytes: each element counts, and nothing beside it."""

from __future__ import annotations

import pytest
import torch

from kedge.offload.held.raw_bytes import demand, digest, same


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 5000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_a_digest_tells_every_element(size, dtype):
    """Wherever one element of a tensor is changed, by however little, its digest changes; a copy has the same."""
    value = torch.arange(size).to(dtype)
    before = digest(value, alone=False)
    assert same(before, digest(value.clone(), alone=False))
    for at in {0, size // 2, size - 1} if size else ():
        other = value.clone()
        other.view(torch.uint8)[at * value.itemsize] ^= 1
        assert not same(before, digest(other, alone=False))


def test_a_digest_of_a_part_looks_at_nothing_else():
    """What lies beside a tensor that is taken alone does not count, in whatever order its dimensions are."""
    whole = torch.randn(64, 64)
    part = whole[:8, :8]
    before = digest(part, alone=True)
    whole[20] = 1.0
    whole[0, 8] = 1.0
    assert same(before, digest(part, alone=True))
    assert same(before, digest(part.t(), alone=True))
    whole[7, 7] += 1.0
    assert not same(before, digest(part, alone=True))


def test_a_device_makes_sure_by_itself():
    """What a device is to compare without anybody waiting passes for the same bytes, and is an error for others."""
    value = torch.randn(5000)
    before = digest(value, alone=False)
    demand(before, digest(value.clone(), alone=False))
    value[4999] += 1
    with pytest.raises(RuntimeError, match="without autograd noticing"):
        demand(before, digest(value, alone=False))
