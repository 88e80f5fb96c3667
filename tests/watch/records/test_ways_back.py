"""Outputs from which no gradient comes back to the input of their module."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.rules import check
from kedge.store.recording import Recording
from tests.watch.watched import watch


class Quantiser(nn.Module):
    """Returns the next rows of its table, and a loss that pulls both together.

    Args:
        straight: Whether gradients of what is made of the rows reach what they are near to.
        pulls: Whether the loss pulls its input as well as the table.
    """

    def __init__(self, *, straight: bool, pulls: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.straight = straight
        self.pulls = pulls

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose by distance."""
        distances = (x[:, None] - self.table.weight).square().sum(2)
        chosen = self.table(distances.argmin(1))
        loss = (chosen - x.detach()).square().mean()
        if self.pulls:
            loss = loss + 0.25 * (chosen.detach() - x).square().mean()
        if self.straight:
            chosen = x + (chosen - x).detach()
        return loss, chosen


class Positions(nn.Module):
    """Returns a table of positions beside what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Look up as many as there are features."""
        return x.relu(), self.table(torch.arange(len(x)) % 4)


class Net(nn.Module):
    """Encodes, passes through a middle that returns two values, and decodes."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Linear(20, 8)
        self.middle = middle
        self.decoder = nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        one, other = self.middle(self.encoder(x))
        if one.dim() == 0:
            return one + F.mse_loss(self.decoder(other), x)
        return F.mse_loss(self.decoder(one + other), x)


def recorded(middle: nn.Module) -> Recording:
    """Train a model with a middle for a few steps."""
    torch.manual_seed(0)
    model = Net(middle)

    def program() -> None:
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(32, 20)).backward()
            optimizer.step()

    return watch(program, every=1).recording()


def test_a_choice_that_passes_no_gradient_is_told_where_a_loss_beside_it_does() -> None:
    """The encoder gets gradients, but none of what is made of the rows that were chosen."""
    recording = recorded(Quantiser(straight=False))
    (event,) = [each for each in recording.events if each.kind == "no-way-back"]
    assert event.site == "middle:out[1]"
    assert event.through == ("middle:out",)

    (finding,) = [each for each in check(recording) if each.code == "UNUSED-PARAM"]
    assert (finding.severity, finding.site) == ("info", "middle:out[1]")
    assert "none comes past middle:out[1]" in finding.message
    assert "learns from middle:out alone" in finding.message


@pytest.mark.parametrize(
    "middle",
    [
        Quantiser(straight=True),
        Quantiser(straight=True, pulls=False),
        Positions(),
    ],
    ids=["straight through", "without a pull", "positions"],
)
def test_what_leads_back_or_has_no_loss_beside_it_is_not_told(middle: nn.Module) -> None:
    """A table of positions depends on nothing that it was given, and is right."""
    recording = recorded(middle)

    assert not [each for each in recording.events if each.kind == "no-way-back"]
    assert not [each for each in check(recording) if each.code == "UNUSED-PARAM"]


def test_an_encoder_that_gets_no_gradient_at_all_is_a_warning() -> None:
    """Then the path ends behind it, which is told of its parameters."""
    recording = recorded(Quantiser(straight=False, pulls=False))

    assert not [each for each in recording.events if each.kind == "no-way-back"]
    (finding,) = [each for each in check(recording) if each.code == "UNUSED-PARAM"]
    assert finding.severity == "warning"
    assert "whole numbers" in finding.message
