"""Weights that become next to nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kedge.rules.parameters.weights_shrunk import WeightsShrunk
from kedge.rules.registry import check
from kedge.store.recording import Recording
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course
from tests.watch.watched import watch


@golden("WEIGHTS-SHRUNK", lacks=(1, 3))
def golden_weights_shrunk(*, fires: bool) -> Golden:
    """Halve a weight in each measured step, or leave it as it is."""
    course = Course(SAMPLES[:10])
    factor = 0.5 if fires else 1.0
    for layer in ("fc1", "fc2"):
        course.weight(layer, lambda number: (0.1 * factor**number, 1e-3, 1e-4, 1e-4))
    course.roots[0]["trained"] = True
    return written(course)


def trained(*, decay: float = 0.0, penalty: float = 0.0, norm: bool = False) -> Recording:
    """Train a net for some hundred steps with weight decay, or a penalty on its weights."""
    torch.manual_seed(0)
    norms = nn.BatchNorm1d(32) if norm else nn.Identity()
    net = nn.Sequential(nn.Linear(8, 32), norms, nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.05, weight_decay=decay)

    def train() -> None:
        for _ in range(200):
            inputs = torch.randn(32, 8)
            loss = nn.functional.cross_entropy(net(inputs), inputs[:, :3].argmax(1))
            if penalty:
                loss = loss + penalty * sum(p.square().sum() for p in net.parameters())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return watch(train, every=10).recording()


@pytest.mark.parametrize("fault", [{"decay": 2.0}, {"penalty": 1.0}, {"decay": 2.0, "norm": True}])
def test_what_draws_all_weights_to_zero_is_named(fault: dict[str, float]) -> None:
    """Before the small outputs, gradients and steps that come of it."""
    recording = trained(**fault)
    first, *others = check(recording)

    assert first.code == "WEIGHTS-SHRUNK"
    assert "2 of 2 weights of Sequential became next to nothing" in first.message
    assert all(each.severity == "info" for each in others)


@pytest.mark.parametrize(("gradient", "number"), [(1e-3, 1), (0.0, 0)])
def test_a_decay_that_nothing_holds_against_is_not_the_fault(gradient: float, number: int) -> None:
    """As where the loss has no gradient: any decay then ends at zero."""
    course = Course(SAMPLES[:10])
    for layer in ("fc1", "fc2"):
        course.weight(layer, lambda sample: (0.1 * 0.5**sample, gradient, 1e-4, gradient))
    course.roots[0]["trained"] = True
    findings = list(WeightsShrunk().check(course.recording()))

    assert len(findings) == number
    assert all(finding.step == SAMPLES[1] for finding in findings)


@pytest.mark.parametrize("kept", [{}, {"decay": 1e-2}, {"penalty": 1e-3}, {"norm": True}])
def test_weights_that_are_held_are_no_finding(kept: dict[str, float]) -> None:
    """Under usual decay and penalties."""
    assert not list(WeightsShrunk().check(trained(**kept)))
