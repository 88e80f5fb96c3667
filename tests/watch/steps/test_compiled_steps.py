"""When compiled code gets a variant without the hooks of measured steps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from kedge.torch_internals import dynamo
from kedge.watch.steps.budget import Budget
from kedge.watch.steps.compiled_steps import CodeVariants, CompiledSteps


class Compiler:
    """Stands for Dynamo, with a clock of the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.again = 0.0, True
        monkeypatch.setattr(dynamo, "has_compiled", lambda: self.seconds > 0)
        monkeypatch.setattr(dynamo, "compile_seconds", lambda: self.seconds)
        monkeypatch.setattr(dynamo, "may_compile_again", lambda: self.again)
        monkeypatch.setattr("kedge.watch.steps.compiled_steps.follow_stance", lambda variants: None)


def steps_of(budget: Budget) -> tuple[CompiledSteps, Any]:
    """Return the decisions for a budget, with operators of one second each, and the session that counts these."""
    session: Any = SimpleNamespace(in_graph=0)
    costs: Any = SimpleNamespace(operators=float)
    shield: Any = SimpleNamespace(around=lambda work, of: work)
    return CompiledSteps(session, budget, costs, CodeVariants(lambda hooked: None, shield)), session


def test_without_compiled_code_hooks_are_there_in_measured_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing is charged."""
    Compiler(monkeypatch)
    budget = Budget(10, 0.03)
    steps, _ = steps_of(budget)
    assert [steps.keeps_hooks(measured=m) for m in (True, False)] == [True, False]
    assert steps.charge(measured=False) == budget.seconds == 0


def test_the_second_variant_comes_when_the_budget_pays_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is charged with what it took."""
    compiler, budget, clock = Compiler(monkeypatch), Budget(10, 0.03), 0.0
    monkeypatch.setattr("kedge.watch.steps.compiled_steps.perf_counter", lambda: clock)
    budget.begin(0.0)
    steps, _ = steps_of(budget)
    compiler.seconds = 4.5
    assert steps.charge(measured=True) == 0
    clock = 149.0
    assert steps.keeps_hooks(measured=False)
    clock = 151.0
    assert not steps.keeps_hooks(measured=False)
    compiler.seconds = 7.0
    steps.charge(measured=False)
    assert budget.seconds == 2.5
    assert steps.keeps_hooks(measured=True)
    assert not steps.keeps_hooks(measured=False)


@pytest.mark.parametrize("share", [0.03, None])
def test_it_comes_when_idle_operators_have_cost_as_much(
    share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit that never pays for it, and without a limit; in measured steps no operator is idle."""
    compiler, budget = Compiler(monkeypatch), Budget(10, share)
    monkeypatch.setattr("kedge.watch.steps.compiled_steps.perf_counter", lambda: 0.0)
    budget.begin(0.0)
    steps, session = steps_of(budget)
    compiler.seconds = 30.0
    session.in_graph = 40
    assert steps.charge(measured=True) == 40
    assert steps.keeps_hooks(measured=False)
    session.in_graph += 29
    steps.charge(measured=False)
    assert steps.keeps_hooks(measured=False)
    session.in_graph += 1
    steps.charge(measured=False)
    assert not steps.keeps_hooks(measured=False)
    assert budget.seconds == 30


def test_hooks_stay_where_nothing_may_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the run is."""
    compiler, budget = Compiler(monkeypatch), Budget(10, 0.03)
    monkeypatch.setattr("kedge.watch.steps.compiled_steps.perf_counter", lambda: math.inf)
    steps, session = steps_of(budget)
    compiler.seconds, compiler.again = 1.0, False
    session.in_graph = 1000
    steps.charge(measured=False)
    assert steps.keeps_hooks(measured=False)


def test_code_that_was_compiled_without_hooks_stays_and_measuring_is_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program compiled late, in a step without hooks: that is no cost of watching, the hooked code is."""
    compiler, budget = Compiler(monkeypatch), Budget(10, 0.03)
    steps, _ = steps_of(budget)
    assert not steps.keeps_hooks(measured=False)
    compiler.seconds = 100.0
    steps.charge(measured=False)
    assert budget.seconds == 0
    assert not steps.keeps_hooks(measured=False)
    assert steps.keeps_hooks(measured=True)
    compiler.seconds = 104.0
    steps.charge(measured=True)
    assert budget.seconds == 4
