"""What makes the steps of a program: each source is reached; the numbers of steps are in the other files."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kedge.watch.steps.steps import StepSource
from tests.watch.watched import descend, net, watch


class Doubled(nn.Module):
    """A transform."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def transformed() -> None:
    """Call a module without parameters."""
    double = Doubled()
    for _ in range(3):
        double(torch.randn(4))


def evaluated(model: nn.Module) -> None:
    """Call a model without gradients."""
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(5, 4))


def evaluated_with_an_optimizer() -> None:
    """Make an optimizer for its state alone."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    evaluated(model)
    assert optimizer.param_groups


def trained_by_hand() -> None:
    """Change the parameters without an optimizer."""
    model = net()
    for _ in range(3):
        model(torch.randn(5, 4)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
                p.grad = None


def evaluated_then_trained() -> None:
    """Go from one source to the next."""
    model = net()
    evaluated(model)
    descend(model, 3)


@pytest.mark.parametrize(
    ("program", "source"),
    [
        (transformed, StepSource.NOTHING),
        (lambda: evaluated(net()), StepSource.FORWARD),
        (evaluated_with_an_optimizer, StepSource.EXPECTED),
        (trained_by_hand, StepSource.BACKWARD),
        (evaluated_then_trained, StepSource.OPTIMIZER),
    ],
)
def test_each_source_of_steps_is_reached(program: Callable[[], None], source: StepSource) -> None:
    """One program for each."""
    assert watch(program).watch.steps.by is source
