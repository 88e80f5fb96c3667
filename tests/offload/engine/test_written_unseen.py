"""What is written where autograd does not see it, by PyTorch's own operations or by the program, never gives a wrong gradient in silence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kedge
from kedge.errors import RebuiltWrong
from tests.marks import needs_cuda

TO = {"rebuild": kedge.Rebuild(), "disk": kedge.Disk(), "disk alone": kedge.Disk(rebuild=False)}


class Noisy(nn.Module):
    """A layer and an `rrelu`, called in one of the ways that there are."""

    def __init__(self, way):
        super().__init__()
        self.linear, self.act, self.way = nn.Linear(16, 64), nn.RReLU(), way

    def forward(self, x):
        h = self.linear(x)
        match self.way:
            case "module":
                return self.act(h)
            case "in place":
                return F.rrelu(h * 1, training=True, inplace=True)
            case "beside dropout":
                return F.dropout(torch.rrelu(F.dropout(h), training=True).sin())
            case _:
                with torch.device("cpu"):  # a mode, which calls the operation for the program
                    return torch.ops.aten.rrelu(h, training=True)


def steps(model, x):
    """Run some steps; return all gradients."""
    torch.manual_seed(0)
    found = []
    for _ in range(3):
        model.zero_grad()
        left = torch.full((32, 64), 7.0)  # in the memory that a blank tensor then gets
        left[::2] = -7.0
        del left
        model(x).square().mean().backward()
        found += [p.grad for p in model.parameters()]
    return found


@pytest.mark.parametrize("to", TO)
@pytest.mark.parametrize("way", ["module", "in place", "beside dropout", "under a mode"])
def test_noise_that_is_drawn_after_it_was_saved_is_the_one_of_backward(way, to):
    """Gradients through `rrelu` are those of the plain program, though its noise is saved while it is blank."""
    model, x = Noisy(way), torch.randn(32, 16)
    plain = steps(model, x)
    with kedge.offload(model, to=TO[to], min_bytes=0) as account:
        offloaded = steps(model, x)

    assert all(map(torch.equal, plain, offloaded))
    assert account.total.kept["unknown"].number == 3


@pytest.mark.parametrize("to", TO)
def test_statistics_that_training_updates_do_not_reach_what_is_rebuilt(to):
    """A forward in evaluation mode can be gone back through after one in training has updated BatchNorm's statistics."""
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))

    def step():
        model.zero_grad()
        model[1].reset_running_stats()
        made = model.eval()(x)
        model.train()(x + 1)
        made.square().mean().backward()
        return [p.grad for p in model.parameters()]

    x = torch.randn(32, 16)
    plain = step()
    with kedge.offload(model, to=TO[to], min_bytes=0) as account:
        for _ in range(2):
            assert all(map(torch.equal, plain, step()))
    assert TO[to].rebuild is False if to == "disk alone" else account.total.rebuilt["relu"].number


def test_numbers_seen_as_others_are_no_fault_of_a_rule():
    """A saved part of a complex product, which has another dtype than the product itself, is kept and no rule is blamed."""
    model = nn.Linear(16, 64)

    def step():
        model.zero_grad()
        h = torch.view_as_complex(model(x).view(-1, 32, 2))
        (h * h).imag.sin().sum().backward()
        return [p.grad for p in model.parameters()]

    x = torch.randn(32, 16)
    plain = step()
    with kedge.offload(model, min_bytes=0) as account:
        assert all(map(torch.equal, plain, step()))
    assert account.dropped == {}


class Late(nn.Module):
    """Changes a single element of what lies between two operations, but not in its first steps."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 128), nn.Linear(128, 128)
        self.how, self.late = how, False

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = F.gelu(a)
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
@pytest.mark.parametrize("to", TO)
def test_one_element_changed_out_of_sight_in_a_later_step(how, to):
    """A change of one element of 65,536, after the step in which rules are compared, raises where something is rebuilt."""
    plain, model = gradients(Late(how)), Late(how)
    with kedge.offload(model, to=TO[to], min_bytes=1024) as account:
        if to == "disk alone":
            assert all(map(torch.equal, plain, gradients(model)))
            return
        with pytest.raises(RebuiltWrong, match="differs from the saved one"):
            gradients(model)
    assert "sum" in account.total.rebuilt


@needs_cuda
@pytest.mark.parametrize("how", ["no_grad", "data"])
def test_a_cuda_device_stops_where_a_later_step_is_wrong(how):
    """On a CUDA device a change of one element out of sight ends the program with an error that says so."""
    program = f"""
import torch, kedge
from tests.offload.engine.test_written_unseen import Late
model = Late({how!r}).cuda()
with kedge.offload(model, min_bytes=1024):
    for model.late in (False, False, True):
        model(torch.randn(512, 32, device="cuda")).square().mean().backward()
torch.cuda.synchronize()
"""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "without autograd noticing" in done.stdout + done.stderr
