"""GRADS-SHRUNK: the share of the gradients that is left, and the weights that hardly move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from kedge.rules.gradients.grads_shrunk import GradsShrunk
from kedge.rules.registry import check
from kedge.rules.rule import Finding
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, steady
from tests.watch.watched import watch

USED = {"kind": "gradients-used", "optimizer": 0, "steps": 30, "arrived": 0.92}


def course(update: float = 1e-5, **entry: float) -> Course:
    """Describe a model whose weights change by a share of their size."""
    made = Course(SAMPLES)
    made.roots = [{"name": "Net", "parameters": 64, "trained": True, "optimizers": [0]}]
    made.weight("fc", steady(0.1, 1e-3, 0.1 * update))
    made.sites.append({"site": ":grad.norm", "shape": []})
    made.events = [
        {"kind": "optimizers", "optimizers": [{"index": 0, "type": "SGD", "roots": [0]}]},
        {**USED, "used": 1.8e-4, "share": 2e-4, "least": 12.0, "most": 12.0, **entry},
        {"kind": "end", "steps": 300},
    ]
    return made


def found(**entry: float) -> list[Finding]:
    """Run the rule alone."""
    return list(GradsShrunk().check(course(**entry).recording()))


def test_clipping_before_the_scale_is_gone_is_named_as_probable() -> None:
    """The norm, times the scale, is the same in all steps."""
    (finding,) = found(scale=65536.0)

    assert finding.severity == "warning"
    assert "0.92 without the scale of 65,536" in finding.message
    assert "probably they were clipped to 12 while still scaled" in finding.message
    assert finding.remedy == "Call scaler.unscale_(optimizer) before clip_grad_norm_."


@pytest.mark.parametrize("entry", [{}, {"scale": 65536.0, "most": 14.0}])
def test_without_that_evidence_only_the_figures_are_said(entry: Mapping[str, float]) -> None:
    """Without a scale, or with norms that differ."""
    (finding,) = found(**entry)

    assert "probably" not in finding.message
    assert finding.remedy.startswith("Clip to a norm near the usual 0.92")


@pytest.mark.parametrize("is_set_to_none", [True, False])
def test_gradients_that_are_cleared_before_the_step_are_an_error(is_set_to_none: bool) -> None:
    """The optimizer's step itself is sound: that nothing changes follows from it."""
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def train() -> None:
        for _ in range(30):
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.zero_grad(set_to_none=is_set_to_none)
            optimizer.step()

    told = {each.code: each for each in check(watch(train, every=1).recording())}

    assert told["GRADS-SHRUNK"].severity == "error"
    assert "the program clears them in between" in told["GRADS-SHRUNK"].message
    assert "before backward()" in told["GRADS-SHRUNK"].remedy
    assert told["NO-EFFECT"].follows == "GRADS-SHRUNK"


@pytest.mark.parametrize("entry", [{"update": 1e-3}, {"share": 0.01}, {"steps": 9}])
def test_what_does_no_harm_is_not_reported(entry: Mapping[str, float]) -> None:
    """Weights that move, a share that is left, or too few steps."""
    assert found(**entry) == []


@pytest.mark.parametrize(("largest", "number"), [(1e-6, 1), (1.0, 0)])
def test_clipping_to_next_to_nothing_is_seen_where_the_optimizer_steps(
    largest: float, number: int
) -> None:
    """Plain SGD with gradients clipped to a millionth, and to one."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def program() -> None:
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), largest)
            optimizer.step()

    said = [
        each for each in check(watch(program, every=1).recording()) if each.code == "GRADS-SHRUNK"
    ]
    assert len(said) == number


@golden("GRADS-SHRUNK", lacks=(0, 1))
def golden_grads_shrunk(*, fires: bool) -> Golden:
    """Clip while the gradients are scaled, or after."""
    entry: dict[str, Any] = {"scale": 65536.0}
    if not fires:
        entry |= {"update": 1e-3, "used": 0.92, "share": 1.0, "least": 5e4, "most": 7e4}
    return written(course(**entry))
