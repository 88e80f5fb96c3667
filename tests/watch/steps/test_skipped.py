"""Steps that are skipped: what is known of them all the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kedge.actions.measure.meter import Meter
from kedge.watch.steps.budget import Budget
from kedge.watch.steps.costs import Costs
from kedge.watch.steps.kind import StepKind
from kedge.watch.watcher import Watcher
from tests.watch.watched import Memory, net

MEASURED, BAD, STEPS = 3, 10, 20


@pytest.fixture(autouse=True)
def _mostly_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps are measured, the others skipped in one run."""

    def choose(budget: Budget, step: int, now: float) -> StepKind:
        budget.kind = StepKind.MEASURED if step < MEASURED else StepKind.SKIPPED
        budget.run = budget._planned = 1 if step < MEASURED else 1000
        budget._wished = False
        return budget.kind

    monkeypatch.setattr(Budget, "_choose", choose)


def run(program: Callable[[Watcher], Any]) -> Memory:
    """Watch a program within a budget."""
    log = Memory()
    log.watch = Watcher(Meter(), log, n=10, budget=0.03)
    with log.watch:
        program(log.watch)
    return log


@pytest.mark.parametrize("then", ["mended", "not stepped", "used"])
def test_the_gradients_of_a_loss_that_is_not_finite_are_measured(then: str) -> None:
    """As backward made them, whatever the program does to them before its optimizer steps, or if it does not step."""

    def program(_: Watcher) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(5, 4)
            x[0, 0] = math.nan if step == BAD else 0.0
            model(x).square().mean().backward()
            if step == BAD and then == "mended":
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.nan_to_num_(0.0)
            if step != BAD or then != "not stepped":
                optimizer.step()

    recording = run(program).recording()
    gradients = recording.rows("0.weight:param.grad")
    bad = gradients.step[~gradients.clean]
    assert bad[0] == BAD


def test_backward_passes_are_counted() -> None:
    """A model that no optimizer trains has gradients in each of them."""
    encoder, head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(head.parameters(), 0.01)

    def program(_: Watcher) -> None:
        for _ in range(STEPS):
            head(encoder(torch.randn(8, 4))).square().mean().backward()
            optimizer.step()
            head.zero_grad()
            encoder.zero_grad()

    log = run(program)
    assert [e["passes"] for e in log.events if e["kind"] == "not-optimized" and e["root"] is not None] == [STEPS]


def test_a_second_optimizer_does_not_take_over_in_skipped_steps() -> None:
    """However many follow each other, the one that steps last in each round still ends the steps."""
    maker, judge, rounds = nn.Linear(2, 2), nn.Linear(2, 1), 100
    makers, judges = (torch.optim.SGD(m.parameters(), 0.001) for m in (maker, judge))

    def program(_: Watcher) -> None:
        for _ in range(rounds):
            for optimizer in (judges, makers):
                optimizer.zero_grad()
                judge(maker(torch.randn(5, 2))).mean().backward()
                optimizer.step()

    log = run(program)
    assert log.watch is not None
    assert log.watch.summary.steps == rounds
    assert [entry.steps for entry in log.watch.steps.optimizers.entries] == [rounds, rounds]


def test_counting_is_in_what_watching_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the steps that were skipped since the last choice too."""
    each = 0.001
    monkeypatch.setattr(Costs, "per_step", property(lambda costs: each))
    took: list[float] = []

    def program(watch: Watcher) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(200):
            model(torch.randn(5, 4)).mean().backward()
            optimizer.step()
        took.append(watch.budget.seconds + watch.budget.counting)

    run(program)
    assert took[0] >= 200 * each
