"""Gradients of what nothing uses: no hook is called with None, and the ledger says that there was none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge


class Halves(nn.Module):
    """Returns two halves."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x, 2, dim=1)


class FirstHalf(nn.Module):
    """Uses the first of two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.halves = nn.Linear(4, 4), Halves()

    def forward(self, x: Tensor) -> Tensor:
        first, _ = self.halves(self.fc(x))
        return first


@pytest.mark.parametrize("selector", ["halves:out.grad", "halves/split:out.grad"])
def test_an_output_that_nothing_uses_has_no_gradient_and_stops_no_backward(selector: str) -> None:
    """PyTorch calls the hook of an unused output with None where others of its node are used; no action sees that."""
    model, x = FirstHalf(), torch.randn(3, 4)
    seen: list[Any] = []
    with kedge.session() as s:
        s.hook(model, selector, lambda value: seen.append(value))
        model(x).sum().backward()
    assert [tuple(value.shape) for value in seen] == [(3, 2)]


def test_a_tensor_that_nothing_uses_is_said_to_have_no_gradient() -> None:
    """The hook of a tensor of the user's stays silent, too, and the ledger tells."""
    used, unused = (torch.ones(2, 3, requires_grad=True) * 1).unbind(0)
    s = kedge.session()
    s.hook(unused, lambda value: value * 2)
    used.sum().backward()
    assert s.ledger().silent()
    s.end(quiet=True)


class Attends(nn.Module):
    """Returns what it makes of a value, and the value, as attention returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.scores(x).softmax(-1)
        return self.out(weights), weights

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(self.attend, x, use_reentrant=True)


@pytest.mark.parametrize("selector", [":out.grad", ":out.grad[1]"])
def test_an_output_that_is_used_within_a_reentrant_checkpoint_alone_has_a_cause(
    selector: str,
) -> None:
    """Its gradient is that of the tensor inside; the one outside has none, and the ledger and the handle say so."""
    model, x = Attends(), torch.randn(2, 4, requires_grad=True)
    s = kedge.session()
    seen = s.hook(model, selector, kedge.record())
    model(x)[0].sum().backward()
    s.end(quiet=True)

    with pytest.raises(
        kedge.errors.NotRecorded, match="the differentiated value does not depend on this tensor"
    ):
        seen[":out.grad[1]"]
