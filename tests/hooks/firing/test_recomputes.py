"""Checkpoints run a part of the forward again within a backward pass: what is edited again, and how it is counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge

MODES = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Net(nn.Module):
    """Three layers, of which the middle one may run in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(3, 3) for _ in range(3))
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.reentrant is None:
            x = torch.tanh(self.middle(x))
        else:
            x = checkpoint(lambda h: torch.tanh(self.middle(h)), x, use_reentrant=self.reentrant)
        return self.last(x)


def gradients(net: Net) -> list[Tensor]:
    """Run a backward pass; returns the gradients of the parameters."""
    net(torch.linspace(-1, 1, 6).reshape(2, 3)).square().sum().backward()
    return [param.grad for param in net.parameters()]


@MODES
def test_an_edit_in_a_checkpoint_is_made_again_when_it_recomputes(reentrant: bool) -> None:
    """The gradients are those of the same edit without a checkpoint."""
    found = []
    for mode in (None, reentrant):
        torch.manual_seed(0)
        net = Net()
        net.reentrant = mode
        with kedge.hook(net, "middle", kedge.scale(3)):
            found.append(gradients(net))

    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", ["out.grad", "param.grad"])
@MODES
def test_a_backward_pass_has_one_number_inside_a_checkpoint_and_outside(
    reentrant: bool, kind: str
) -> None:
    """A reentrant checkpoint runs a pass of its own inside; the program has called backward once."""
    net = Net()
    net.reentrant = reentrant
    sites = {"out.grad": "*:out.grad", "param.grad": "*.weight:param.grad"}[kind]
    with kedge.hook(net, sites, kedge.record(keep=None, copy=True)) as h:
        for _ in range(2):
            gradients(net)

    for name in ("last", "middle", "first"):
        records = h.records(sites.replace("*", name))
        assert [record.event.backward for record in records] == [0, 1]
