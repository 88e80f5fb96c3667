"""Losses in which each prediction meets each target."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.rules.training.paired_targets import PairedTargets
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, steady
from tests.watch.watched import watch

SOURCE = {"file": "train.py", "line": 12, "function": "fit", "text": "loss.backward()"}
Loss = Callable[[Tensor, Tensor], Tensor]


@golden("PAIRED-TARGETS", lacks=(0, 1))
def golden_paired_targets(*, fires: bool) -> Golden:
    """Take a column of predictions from a row of targets, or from a column."""
    course = Course(SAMPLES[:3])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.loss([2.3, 2.2, 2.1], every=10, source=SOURCE)
    graph = {"kind": "loss-graph", "step": 0, "site": "loss", "nodes": ["MseLossBackward0"]}
    if fires:
        graph["broadcast"] = {"by": "expand", "shape": [32, 1], "to": [32, 32]}
    course.events = [graph]
    return written(course)


def said_of(loss: Loss, *, width: int = 1, batch: int = 16) -> list[str]:
    """Train a regression for a few steps; return what the rule says."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, width))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def train() -> None:
        for _ in range(4):
            inputs = torch.randn(batch, 8)
            optimizer.zero_grad()
            loss(net(inputs), inputs.sum(1)).backward()
            optimizer.step()

    return [each.message for each in PairedTargets().check(watch(train, every=1).recording())]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        lambda out, target: (out - target).square().mean(),
        lambda out, target: (target - out).abs().mean(),
        lambda out, target: (out.sigmoid() - target).pow(2).sum() / 2,
        lambda out, target: (out.squeeze() - target[:, None]).pow(2).mean().sqrt(),
        lambda out, target: torch.log(torch.cosh(out - target)).mean(),
        lambda out, target: F.mse_loss(2.0 * out + 1.0, target),
        lambda out, target: 2 * (out.square().mean() - 0.5 * F.mse_loss(out, target)) / 3,
        lambda out, target: -(out.sigmoid().log() * target).mean(),
        lambda out, target: -torch.exp(out.sigmoid().log() - 1.0).mul(target).mean(),
    ],
)
def test_a_column_beside_a_row_is_named(loss: Loss) -> None:
    """In PyTorch's losses and in those of one's own, and in either order."""
    (message,) = said_of(loss)
    assert "compares each of 16 predictions with each of 16 targets or weights" in message
    assert "were broadcast to (16, 16)" in message


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "loss",
    [
        lambda out, target: F.smooth_l1_loss(out.gather(1, target.long()[:, None] % 4), target),
        lambda out, target: F.mse_loss(out[:, 0], target[:, None]),
        lambda out, target: F.mse_loss(out[torch.arange(16), target.long() % 4], target[:, None]),
        lambda out, target: ((out[:, :2] * out[:, 2:]).sum(1) - target[:, None]).square().mean(),
    ],
    ids=["value of an action", "one of several", "by index", "product of two factors"],
)
def test_what_is_chosen_of_the_outputs_is_compared_as_a_prediction(loss: Loss) -> None:
    """The value of the action that was taken, beside a row of targets."""
    (message,) = said_of(loss, width=4)
    assert "were broadcast to (16, 16)" in message


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, target: F.mse_loss(out, target[:, None]),
        lambda out, target: F.mse_loss(out.squeeze(1), target),
        lambda out, target: (out - target[:, None]).square().mean(),
        lambda out, target: (out - out.T).square().mean(),
        lambda out, target: F.relu(1 - (out - out.detach().T)).mean(),
        lambda out, target: (out[:, None, 0] - target).square().mean(),
        lambda out, target: (out - 1.0).square().mean(),
        lambda out, target: -(out.sigmoid().log().squeeze(1) * target).mean(),
        lambda out, target: (out.sigmoid() * torch.eye(len(target))).sum(),
        lambda out, target: (target - out.squeeze(1).view(-1, 1)).square().mean(),
        lambda out, target: F.softplus(out.detach().T - out).mean(),
        lambda out, target: ((out - target).abs() - torch.eye(len(target))).square().mean(),
    ],
)
def test_pairs_that_are_meant_are_no_finding(loss: Loss) -> None:
    """Shapes that agree, differences of predictions, and dimensions that the program has added."""
    assert said_of(loss) == []


def test_as_many_outputs_as_samples_are_no_pairs() -> None:
    """A square of predictions is not a column that was spread."""
    assert said_of(lambda out, target: (out - target).square().mean(), width=16) == []


def test_the_quantiles_of_one_sample_are_no_pairs() -> None:
    """Each is compared with each sample of the target's quantiles, in a view or an expanded one."""

    def quantiles(out: Tensor, target: Tensor) -> Tensor:
        errors = target[:1] + torch.randn(16, 1) - out.view(-1)
        return F.smooth_l1_loss(errors, torch.zeros(16, 16))

    def squeezed(out: Tensor, target: Tensor) -> Tensor:
        return (target[:1] + torch.randn(16, 1) - out.squeeze(0)).abs().mean()

    assert said_of(quantiles, width=16, batch=1) == []
    assert said_of(squeezed, width=16, batch=1) == []
