"""Glances: gradients looked at behind an optimizer's step, with no hook on the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from watched import watched

from kedge.rules.registry import check
from kedge.watch.budget import Level, Pace
from kedge.watch.watcher import Watch


def train(model: nn.Module, steps: int, *, broken: int = -1, lasting: bool = True, zero: bool = True) -> None:
    """Train, with a NaN in the loss of one step, from which the parameters keep it or not; clear gradients where it is said."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(steps):
        if zero:
            optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        (loss * float("nan") if step == broken else loss).backward()
        kept = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        if not zero:
            optimizer.zero_grad()
        if step == broken and not lasting:
            with torch.no_grad():
                for param, value in zip(model.parameters(), kept, strict=True):
                    param.copy_(value)


def net() -> nn.Sequential:
    """A small network."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def hooks_on(model: nn.Module) -> int:
    """Count the hooks on a model, its parts and its parameters."""
    forward = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return forward + sum(len(p._backward_hooks or ()) for p in model.parameters())


def test_a_healthy_run_is_glanced_at_without_a_hook_or_a_row(paced: Callable[..., None]) -> None:
    """After the first step nothing is on the model, and nothing is written."""
    paced(Level.GLANCE)
    model, hooks = net(), []

    def program(watch: Watch) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(9):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            hooks.append(hooks_on(model))

    log = watched(program)
    assert hooks == [0] * 9
    assert {row["step"] for row in log.rows} == {0}
    assert log.watch.summary.levels == {"full": 1, "light": 8, "off": 0}
    assert log.watch.summary.steps == 9


@pytest.mark.parametrize("lasting", [True, False])
def test_what_a_glance_finds_is_written_for_its_step(paced: Callable[..., None], lasting: bool) -> None:
    """The gradients of the step itself are measured, and the next step in full, whether the NaN stays or not."""
    paced(Level.GLANCE)
    log = watched(lambda watch: train(net(), 9, broken=4, lasting=lasting))
    recording = log.recording()
    gradient = recording.rows("0.weight:param.grad")
    assert gradient.step.tolist()[:3] == [0, 4, 5]
    assert [bool(clean) for clean in gradient.clean[:3]] == [True, False, not lasting]
    assert 5 in recording.rows("0:out").step.tolist()
    (finding, *_) = [f for f in check(recording) if f.code == "NAN-BORN"]
    assert finding.step == 4
    assert log.watch.summary.steps == 9


def test_a_parameter_is_not_said_to_be_bad_before_it_is(paced: Callable[..., None]) -> None:
    """What the step did to the parameters belongs to the next one."""
    paced(Level.GLANCE)
    recording = watched(lambda watch: train(net(), 9, broken=4)).recording()
    rows = recording.rows("0.weight:param")
    assert 4 not in rows.step[~rows.clean].tolist()
    assert 5 in rows.step[~rows.clean].tolist()


def test_where_gradients_are_gone_light_steps_are_made(paced: Callable[..., None]) -> None:
    """A hook on the optimizer that clears gradients with the step leaves nothing to glance at."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    paced(Level.GLANCE, Level.LOOK)

    def program(watch: Watch) -> None:
        for step in range(12):
            loss = model(torch.randn(4, 8)).square().mean()
            (loss * float("nan") if step >= 6 else loss).backward()
            optimizer.step()

    log = watched(program)
    found = [f for f in check(log.recording()) if f.code == "NAN-BORN"]
    assert found
    assert not log.watch.failed
    assert log.watch.summary.steps == 12


def test_steps_made_within_a_backward_are_looked_at_instead() -> None:
    """There the gradients of the step are still on their way, so light steps are made in place of glances."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(param: nn.Parameter) -> None:
        optimizer.step()
        optimizer.zero_grad()

    model[0].weight.register_post_accumulate_grad_hook(step)

    def program(watch: Watch) -> None:
        for number in range(1500):
            loss = model(torch.randn(4, 8)).square().mean()
            (loss * float("nan") if number >= 500 else loss).backward()

    log = watched(program)
    assert log.watch.summary.levels["light"] > 5
    assert [f for f in check(log.recording()) if f.code == "NAN-BORN"]


def test_glances_come_back_with_the_gradients(paced: Callable[..., None]) -> None:
    """A few steps without any, or parameters that are frozen, do not end them; others are chosen."""
    paced(Level.GLANCE, Level.GLANCE, Level.LOOK)
    model, seen = net(), []

    def program(watch: Watch) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(20):
            optimizer.zero_grad()
            if step == 8:
                for param in model.parameters():
                    param.requires_grad_(param.numel() == 64)  # the first weight alone
            if not 3 <= step < 6:
                model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            seen.append(watch.pace.counts[Level.GLANCE])

    watched(program)
    assert seen[5] < seen[9]
    assert seen[19] - seen[10] >= 3


def test_a_glance_that_nobody_makes_is_no_excuse() -> None:
    """If a step ends and the glance at it was not made, the next one is looked at with hooks."""
    pace = Pace(10, 0.03)
    pace.begin(0.0, 0.0)
    now = cost = 0.0
    for step in range(5000):
        spent = 8e-4 if pace.level is not Level.OFF else 0.0
        now, cost = now + 4e-4 + spent, cost + spent
        if now >= pace.wake:
            pace.heard = pace.glancing = True
            pace.settling = 0
            pace.ended(step, now, cost)
    assert pace.counts[Level.LOOK] > 5
    assert cost / (now - cost) < 0.035
