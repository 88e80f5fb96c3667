"""Causes of sites that never fired, where the program changes the model in the block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import kedge

KINDS = "a, a:in, a:out.grad, a.0, a.0:saved, a/relu, a.0/linear, a.0.weight:param"


class Part(nn.Sequential):
    """A layer and an operation."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Replacing(nn.Module):
    """Makes one of its children anew in each forward, as some attention layers of big_bird do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Part(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.a = Part()
        return self.b(self.a(x))


@pytest.mark.parametrize("site", KINDS.split(", "))
def test_a_module_that_the_forward_replaces_is_the_cause(site: str) -> None:
    """The path is called, but the hooked object is not there any more."""
    model = Replacing()
    s = kedge.session()
    s.hook(model, f"{site}, b", kedge.record())
    model(torch.randn(1, 2)).sum().backward()
    ledger = s.ledger()
    s.end(quiet=True)

    assert ledger["b"].fired == 1
    cause = next(entry.cause for entry in ledger if entry.site.path != "b")
    assert cause.why.startswith("another module is at its path now")


def test_a_module_that_is_removed_has_that_cause() -> None:
    """Neither it nor what was inside it is part of the model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
    s = kedge.session()
    s.hook(model, "**", kedge.record())
    model[1] = None
    s.hook(model, "0", kedge.record())
    model[0](torch.randn(1, 2))
    ledger = s.ledger()
    s.end(quiet=True)
    assert {ledger[site].cause.why for site in ("1", "1.0")} == {"it is no longer part of the model"}
