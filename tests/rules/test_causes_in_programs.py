"""Which finding leads in small programs with one fault, and that their sound twins are quiet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.rules import check
from kedge.rules.rule import Finding
from tests.watch.watched import watch

Loss = Callable[[nn.Module], Tensor]


def found(
    model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, steps: int = 60
) -> list[Finding]:
    """Train a model for some steps, and return the findings that are no plain hints."""

    def program() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()

    findings = check(watch(program, every=1).recording())
    return [each for each in findings if each.severity != "info" or each.follows]


def of_margin(margin: float) -> list[Finding]:
    """Keep two kinds of samples apart, with a decay that moves the weights as well."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.PReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), 0.05, weight_decay=1e-2)
    kinds = torch.randint(2, (64,))
    samples = torch.randn(64, 4) + 2 * kinds[:, None]

    def loss(model: nn.Module) -> Tensor:
        out = model(samples)
        one, other = out[kinds == 0], out[kinds == 1]
        near = (one[:20] - one[1:21]).square().sum(1)
        far = (one[:20] - other[:20]).square().sum(1)
        return (near - far + margin).relu().mean()

    return found(model, loss, optimizer)


def test_a_loss_without_a_gradient_leads_before_what_the_decay_does() -> None:
    """A margin far below zero is satisfied from the start, and the weights shrink all the same."""
    findings = of_margin(-1000.0)

    assert [(each.code, each.severity) for each in findings][:1] == [("GRAD-ZERO", "error")]
    assert {each.follows for each in findings[1:]} == {"GRAD-ZERO"}
    assert of_margin(1.0) == []


class Gated(nn.Module):
    """Adds learned noise to what it chooses by, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(6, 3) * 0.1)
        self.noise = nn.Parameter(torch.zeros(6, 3))
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Weigh the experts."""
        chosen = x @ self.gate
        if self.training:
            chosen = chosen + torch.randn_like(chosen) * F.softplus(x @ self.noise)
        said = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (chosen.softmax(1)[:, :, None] * said).sum(1)


@pytest.mark.parametrize(
    ("training", "codes"), [(False, ["EVAL-MODE", "UNUSED-PARAM"]), (True, [])]
)
def test_what_training_alone_uses_follows_from_the_mode(training: bool, codes: list[str]) -> None:
    """As the noise of a gate."""
    torch.manual_seed(0)
    model = Gated().train(training)
    goal = torch.randn(6, 4)

    def loss(model: nn.Module) -> Tensor:
        samples = torch.randn(32, 6)
        return F.mse_loss(model(samples), samples @ goal)

    findings = found(model, loss, torch.optim.Adam(model.parameters(), 1e-2))
    assert [each.code for each in findings] == codes
    assert [each.follows for each in findings[1:]] == ["EVAL-MODE"] * len(findings[1:])


def of_scores(sign: int) -> list[Finding]:
    """Make a score small, or large without end."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)
    )

    def loss(model: nn.Module) -> Tensor:
        samples = torch.randn(64, 4)
        score = (model(samples).squeeze(1).exp() + samples.sum(1).exp()).square()
        return sign * score.log().mean()

    return found(model, loss, torch.optim.Adam(model.parameters(), 0.005), steps=80)


def test_the_sign_of_a_loss_leads_before_the_infinity_that_it_ends_in() -> None:
    """It grows without end, and then overflows."""
    findings = of_scores(-1)

    assert [(each.code, each.follows) for each in findings[:2]] == [
        ("LOSS-BELOW-ZERO", ""),
        ("NAN-BORN", "LOSS-BELOW-ZERO"),
    ]
    assert [each.severity for each in findings[:2]] == ["error", "error"]
    assert of_scores(1) == []


class TwoHeads(nn.Module):
    """Restores its input from numbers of which a share of the units is dead."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.first = nn.Linear(8, 16)
        self.middle = nn.Linear(16, 16)
        self.wide = nn.Linear(16, 64)
        self.act = nn.ReLU()
        self.last = nn.Linear(64, 8)
        with torch.no_grad():
            self.wide.bias[:40] = -100.0

    def forward(self, x: Tensor) -> Tensor:
        """Restore it."""
        return self.last(self.act(self.wide(self.middle(self.first(x) * self.factor))))


@pytest.mark.parametrize(
    ("factor", "codes"), [(0.0, {"GRAD-ZERO", "DEAD-CHANNEL"}), (1.0, {"DEAD-CHANNEL"})]
)
def test_a_product_with_zero_does_not_follow_from_units_that_are_dead_elsewhere(
    factor: float, codes: set[str]
) -> None:
    """Half of the units of a later layer pass the gradient on."""
    torch.manual_seed(0)
    model = TwoHeads(factor)

    def loss(model: nn.Module) -> Tensor:
        samples = torch.randn(64, 8)
        return F.mse_loss(model(samples), samples)

    findings = found(model, loss, torch.optim.SGD(model.parameters(), 0.05))
    loud = [each for each in findings if each.severity != "info"]
    assert {each.code for each in loud} == codes
    assert all(not each.follows for each in loud)
