"""What makes the steps of a program, and whose time is counted; the numbers of steps are in the other files."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kedge.actions.measure.meter import Meter
from kedge.watch.own_warnings import ignore_warnings, show_warnings
from kedge.watch.steps.costs import Costs
from kedge.watch.steps.shield import WatchShield
from kedge.watch.steps.steps import StepSource
from tests.watch.watched import descend, net, watch

pytestmark = pytest.mark.timing


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


def test_time_within_time_is_counted_once() -> None:
    """And while it passes."""
    costs = Costs(Meter())
    start = time.perf_counter()
    with costs:
        with costs:
            time.sleep(0.02)
        assert costs.timed >= 0.02
        time.sleep(0.01)
    passed = time.perf_counter() - start
    assert 0.03 <= costs.timed <= passed


def test_work_that_fails_is_the_last() -> None:
    """The program goes on, and nothing more is done."""
    meter = Meter()
    shield, calls = WatchShield(meter, Costs(meter)), []

    def work() -> None:
        calls.append(1)
        raise OSError("no")

    hook = shield.around(work)
    hook()
    hook()
    assert isinstance(shield.failure, OSError)
    assert calls == [1]


def test_warnings_that_were_printed_once_are_not_printed_again() -> None:
    """What Kedge ignores for a while is ignored, and Python still knows which of the program's warnings it has printed."""
    registry: dict[str, int] = {}

    def warn(message: str) -> None:
        warnings.warn_explicit(message, UserWarning, "prog.py", 1, registry=registry)

    with warnings.catch_warnings(record=True) as printed:
        warnings.simplefilter("default")
        warn("once")
        ignore_warnings(["Error detected in "])
        warn("once")
        warn("Error detected in MulBackward0")
        show_warnings(["Error detected in "])
        warn("once")
        warn("Error detected in DivBackward0")
    assert [str(each.message) for each in printed] == ["once", "Error detected in DivBackward0"]
