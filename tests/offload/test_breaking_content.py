"""What is changed where autograd does not see it never gives a wrong gradient without an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

import kedge
from kedge.errors import RebuiltWrong
from kedge.offload.held.raw_bytes import demand, digest, same

LOSSLESS = [kedge.Rebuild(), kedge.Disk(), kedge.Disk(rebuild=False)]
NAMES = ["rebuild", "disk", "disk without rebuilding"]


class Late(nn.Module):
    """Changes a single element of what lies between two operations, but not in its first steps."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 128), nn.Linear(128, 128)
        self.how, self.late = how, False

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = gelu(a)
        product = b * torch.sigmoid(a)
        if self.late and self.how == "no_grad":
            with torch.no_grad():
                product[3, 5] = 100.0
        if self.late and self.how == "data":
            product.data[3, 5] = 100.0
        return self.last(product + b)


def gradients(model: Late) -> list[Tensor]:
    """Train two steps, and one in which the element is changed; returns the gradients of that one."""
    for model.late in (False, False, True):
        model.zero_grad()
        x = torch.randn(512, 32, generator=torch.Generator().manual_seed(1))
        model(x).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("how", ["no_grad", "data"])
@pytest.mark.parametrize("to", LOSSLESS, ids=NAMES)
def test_one_element_changed_out_of_sight_in_a_later_step(how, to):
    """A change of one element of 65,536, after the step in which rules are compared, raises where something is rebuilt."""
    plain, model = gradients(Late(how)), Late(how)
    with kedge.offload(model, to=to, min_bytes=1024) as account:
        if to == kedge.Disk(rebuild=False):
            assert all(map(torch.equal, plain, gradients(model)))
            return
        with pytest.raises(RebuiltWrong, match="differs from the saved one"):
            gradients(model)
    assert "sum" in account.total.rebuilt


@pytest.mark.parametrize("size", [3, 1000, 200_000])
@pytest.mark.parametrize("part", [False, True], ids=["whole", "alone"])
def test_one_element_changed_between_two_saves_is_another_entry(size, part):
    """A tensor of which one element was changed through `.data` between two uses is stored twice."""
    w = torch.ones(size, requires_grad=True)
    x = torch.full((4 * size if part else size,), 2.0)[:size]
    with kedge.offload(nn.Identity(), to=kedge.Disk(rebuild=False), min_bytes=0):
        first = x * w
        x.data[size // 2] = 5.0
        (first + x * w).sum().backward()

    expected = torch.full((size,), 4.0)
    expected[size // 2] = 7.0
    assert torch.equal(w.grad, expected)


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("how", ["no_grad", "data"])
def test_a_cuda_device_stops_where_a_later_step_is_wrong(how):
    """On a CUDA device a change of one element out of sight ends the program with an error that says so."""
    program = f"""
import torch, kedge
from tests.offload.test_breaking_content import Late
model = Late({how!r}).cuda()
with kedge.offload(model, min_bytes=1024):
    for model.late in (False, False, True):
        model(torch.randn(512, 32, device="cuda")).square().mean().backward()
torch.cuda.synchronize()
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "without autograd noticing" in done.stdout + done.stderr
