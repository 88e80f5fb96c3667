"""What PyTorch's own operations write without counting it: noise that is drawn after it was saved, statistics that are shared."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kedge

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
