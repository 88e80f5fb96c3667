"""Steps on a device that are not measured: what arrives late from them is news all the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.rule import Finding
from kedge.store.rows import FULL
from kedge.watch.records import curves, gradient_checks
from kedge.watch.step import StepKind
from kedge.watch.steps.budget import Budget
from tests.watch.watched import Memory, watch

MEASURED, BAD, STEPS = 3, 10, 20


@pytest.fixture(autouse=True)
def _mostly_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps are measured, and those that are asked for; the others are skipped in one run."""

    def choose(budget: Budget, step: int, now: float) -> StepKind:
        measured = step < MEASURED or budget._wished
        budget.kind = StepKind.MEASURED if measured else StepKind.SKIPPED
        budget.run = budget._planned = 1 if measured else 1000
        budget._wished = False
        return budget.kind

    monkeypatch.setattr(Budget, "_choose", choose)
    monkeypatch.setattr(curves, "_PATIENCE", 0.0)
    monkeypatch.setattr(gradient_checks, "_SHARE", math.inf)


class Rooted(nn.Module):
    """A root whose slope is infinite where it is told to be, and healed there: so only backward makes NaN."""

    is_bad = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.abs() + 1.0
        return torch.where(x > 0, torch.sqrt(x * (0.0 if self.is_bad else 1.0)), 0.0)


def train(
    loss_of: Callable[[Tensor, int], Tensor],
    *,
    root: Rooted | None = None,
    between: Callable[[nn.Module], Any] = lambda model: None,
    is_bad: Callable[[int], bool] = lambda step: step == BAD,
    steps: int = STEPS,
) -> Memory:
    """Train on the device; each step waits for it at its end, so that all has arrived when the next one begins."""

    def program() -> None:
        model = nn.Sequential(nn.Linear(4, 8), root or nn.Tanh(), nn.Linear(8, 1)).to("sim")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(steps):
            optimizer.zero_grad()
            if root is not None:
                root.is_bad = is_bad(step)
            loss_of(model(torch.randn(5, 4).to("sim")), step).backward()
            between(model)
            optimizer.step()
            torch.accelerator.synchronize()

    return watch(program)


def found(log: Memory) -> list[Finding]:
    """Run the rule."""
    assert log.watch is not None
    assert not log.watch.failed
    return list(NanBorn().check(log.recording()))


def of_a_zero(y: Tensor, step: int) -> Tensor:
    """Take the logarithm of zero in one step."""
    return torch.log(y.abs() * float(step != BAD) + float(step < BAD)).mean()


def squares(y: Tensor, step: int) -> Tensor:
    """Return a loss that is finite."""
    return y.square().mean()


def test_a_loss_that_is_not_finite_is_named_with_its_step_and_lines(sim: Any) -> None:
    """Its graph no longer exists when it arrives, so the operations are those that can have made it."""
    finding = found(train(of_a_zero))[0]
    assert (finding.site, finding.step, finding.severity) == ("loss", BAD, "error")
    assert f"at step {BAD}" in finding.message
    assert f"It was last finite at step {BAD - 1}." in finding.message
    assert "can make such a value of usual numbers are: log at " in finding.message
    assert "test_late_news.py:" in finding.message
    assert "gradients were not checked" not in finding.message


def test_short_steps_are_not_all_checked(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finding says so where the step before was not: its backward may have made the value."""
    monkeypatch.setattr(gradient_checks, "_SHARE", 1e-9)
    finding = found(train(of_a_zero))[0]
    assert (finding.site, finding.step) == ("loss", BAD)
    assert "gradients were not checked" in finding.message


def test_the_step_after_the_news_is_measured(sim: Any) -> None:
    """As soon as the number has arrived, in the middle of a run of skipped steps."""
    assert BAD + 3 > next(step for step in train(of_a_zero).steps(FULL) if step >= MEASURED) > BAD


@pytest.mark.parametrize("is_late", [True, False])
def test_what_has_not_arrived_is_waited_for_at_the_end(
    sim: Any, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what happens in the last step, and if nothing was sent before."""
    if is_late:
        monkeypatch.setattr(curves, "_PATIENCE", math.inf)
    (finding,) = found(train(of_a_zero, steps=BAD + 1))
    assert (finding.site, finding.step, finding.severity) == ("loss", BAD, "error")
    assert "log at " in finding.message


def test_what_only_backward_makes_is_noticed_in_its_step(sim: Any) -> None:
    """The loss of that step is finite; of the gradients that are checked, the finite ones delimit the place."""
    (finding,) = found(train(squares, root=Rooted()))
    assert (finding.site, finding.step) == ("0.bias:param.grad", BAD)
    assert "the loss was finite, and so was 2.weight:param.grad" in finding.message
    assert "such as that of 1 (Rooted)" in finding.message


def test_gradients_that_the_optimizer_never_gets_are_no_error(sim: Any) -> None:
    """As with a loss scale, which skips such steps, the run goes on; and they are news once."""

    def mend(model: nn.Module) -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.nan_to_num_(0.0, 0.0, 0.0)

    log = train(squares, root=Rooted(), between=mend, is_bad=lambda step: step in (BAD, BAD + 1))
    assert all(finding.severity != "error" for finding in found(log))
    rows = log.recording().rows("0.bias:param.grad")
    assert rows.step[~rows.clean].tolist() == [BAD]


@pytest.mark.parametrize("scale", [1.0, 1e25])
def test_large_gradients_are_finite(sim: Any, scale: float) -> None:
    """Their squares are beyond float32; they are read in float64."""

    def grow(model: nn.Module) -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(1 / scale)

    log = train(lambda y, step: y.square().mean() * (scale if step > 5 else 1.0), between=grow)
    assert found(log) == []
    assert [event["kind"] for event in log.events if event["kind"] == "bad-backward"] == []


def test_nothing_waits_for_the_device(sim: Any) -> None:
    """In skipped steps; what arrives is asked for without waiting."""
    waits: list[int] = []

    def program() -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)).to("sim")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        x = torch.randn(5, 4).to("sim")
        for step in range(STEPS):
            if step == MEASURED + 2:
                sim.reset_counts()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        waits.append(sum(sim.counts()["syncs"].values()))

    assert not watch(program).watch.failed
    assert waits == [0]


def test_a_loss_that_the_optimizer_may_not_have_got_is_no_error(
    sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program looks at it and goes on with the next batch; no gradient of it was recorded."""
    monkeypatch.setattr(gradient_checks, "_SHARE", 1e-9)

    def program() -> None:
        model = nn.Linear(4, 1).to("sim")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for turn in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 4).to("sim")).square().mean()
            loss = loss / torch.full_like(loss, float(turn != BAD))
            loss.backward()
            if loss.isfinite():
                optimizer.step()
            torch.accelerator.synchronize()

    (finding,) = found(watch(program))
    assert (finding.site, finding.step, finding.severity) == ("loss", BAD, "warning")
    assert finding.evidence.recovered


def test_a_loss_that_was_made_otherwise_in_its_step_is_told_as_it_was(sim: Any) -> None:
    """The next step makes it as before; what is said of the bad one is true of that one."""

    def by_root(y: Tensor, step: int) -> Tensor:
        loss = squares(y, step)
        if step == BAD:
            return torch.sqrt(loss - loss - 1.0)
        return torch.log(loss + 1.0)

    finding = found(train(by_root))[0]
    assert (finding.site, finding.step) == ("loss", BAD)
    assert "numbers are: sqrt" in finding.message
    assert "log" not in finding.message.replace("torch.log", "")
