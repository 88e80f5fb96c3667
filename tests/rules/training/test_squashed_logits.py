"""Logits that come straight from an activation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.rules.training.squashed_logits import SquashedLogits
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, steady
from tests.watch.watched import watch

SOURCE = {"file": "train.py", "line": 12, "function": "fit", "text": "loss.backward()"}


@golden("SQUASHED-LOGITS", lacks=(0, 1))
def golden_squashed_logits(*, fires: bool) -> Golden:
    """Pass what a ReLU returned to cross-entropy, or logits."""
    course = Course(SAMPLES[:3])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.loss([2.3, 2.2, 2.1], every=10, source=SOURCE)
    nodes = ["NllLossBackward0", "LogSoftmaxBackward0", "AddmmBackward0"]
    if fires:
        nodes.insert(2, "ReluBackward0")
    course.events = [{"kind": "loss-graph", "step": 0, "site": "loss", "nodes": nodes}]
    return written(course)


def said_of(activation: Callable[[Tensor], Tensor], loss: Callable[..., Tensor]) -> list[str]:
    """Train a layer with an activation for a few steps; return what the rule says."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def train() -> None:
        for _ in range(4):
            inputs = torch.randn(16, 8)
            classes = inputs[:, :3].argmax(1)
            optimizer.zero_grad()
            loss(activation(layer(inputs)), classes).backward()
            optimizer.step()

    recording = watch(train, every=1).recording()
    return [finding.message for finding in SquashedLogits().check(recording)]


def of_each_class(logits: Tensor, classes: Tensor) -> Tensor:
    """A loss of each class by itself."""
    return F.binary_cross_entropy_with_logits(logits, F.one_hot(classes, 3).float())


@pytest.mark.parametrize(
    ("activation", "loss", "says"),
    [
        (F.relu, F.cross_entropy, "is cross_entropy, come straight from relu: none is below 0."),
        (torch.tanh, F.cross_entropy, "straight from tanh: all lie between -1 and 1."),
        (F.relu, of_each_class, "is binary_cross_entropy_with_logits, come straight from relu"),
        (lambda x: F.relu(x).squeeze(), F.cross_entropy, "come straight from relu"),
    ],
)
def test_an_activation_before_the_loss_is_named(
    activation: Callable[[Tensor], Tensor], loss: Callable[..., Tensor], says: str
) -> None:
    """Whatever only changes the shape may lie between."""
    (message,) = said_of(activation, loss)
    assert says in message


@pytest.mark.parametrize(
    "activation",
    [
        lambda x: x,
        F.leaky_relu,
        lambda x: 5 * torch.tanh(x / 5),
        lambda x: F.relu(x) @ torch.eye(3),
    ],
)
def test_logits_that_may_be_any_number_are_no_finding(
    activation: Callable[[Tensor], Tensor],
) -> None:
    """Nor those that are capped on purpose, or a ReLU further behind."""
    assert said_of(activation, F.cross_entropy) == []


def divergence(features: Tensor, classes: Tensor) -> Tensor:
    """The divergence of a student's features from a teacher's, as a distribution over channels."""
    teacher = F.softmax(F.one_hot(classes, 3).float(), 1)
    return F.kl_div(F.log_softmax(features, 1), teacher, reduction="batchmean")


def divergence_by_hand(features: Tensor, classes: Tensor) -> Tensor:
    """The same, written out."""
    teacher = F.log_softmax(F.one_hot(classes, 3).float(), 1)
    return (teacher.exp() * (teacher - F.log_softmax(features, 1))).sum(1).mean()


def certainty(features: Tensor, classes: Tensor) -> Tensor:
    """How much few of the features stand out."""
    logarithms = F.log_softmax(features, 1)
    return -(logarithms.exp() * logarithms).sum(1).mean() + classes.sum() * 0


@pytest.mark.parametrize("loss", [divergence, divergence_by_hand, certainty])
def test_features_that_are_compared_as_distributions_are_no_logits(
    loss: Callable[..., Tensor],
) -> None:
    """A student imitates the features of a teacher, both of which come after a ReLU."""
    assert said_of(F.relu, loss) == []


def soft_targets(logits: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy with probabilities as targets."""
    return F.cross_entropy(logits, F.one_hot(classes, 3).float())


def smoothed(logits: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy with smoothed labels."""
    return F.cross_entropy(logits, classes, label_smoothing=0.1)


@pytest.mark.parametrize("loss", [soft_targets, smoothed])
def test_other_targets_of_cross_entropy_make_no_difference(loss: Callable[..., Tensor]) -> None:
    """Its graph has other operations then."""
    (message,) = said_of(F.relu, loss)
    assert "is cross_entropy, come straight from relu" in message
