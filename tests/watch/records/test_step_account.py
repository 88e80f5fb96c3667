"""The list of the tensors saved in the first step: its hooks leave without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from kedge.watch.records.step_account import StepAccount
from kedge.watch.run.begin import make_watch
from kedge.watch.run.options import WatchOptions
from tests.watch.watched import Memory, batch, net

top = torch._C._autograd._top_saved_tensors_default_hooks


@pytest.fixture(autouse=True)
def no_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what other tests have in memory: optimizers, which may step later, and code that hooks saved tensors."""
    monkeypatch.setattr("kedge.watch.steps.steps.any_optimizer", lambda: False)
    monkeypatch.setattr("kedge.watch.records.step_account.line_with", lambda word: None)


def transform() -> None:
    """Differentiate by `torch.func`, which refuses to run under saved-tensor hooks."""
    x = torch.ones(3)
    assert torch.equal(torch.func.grad(lambda x: x.square().sum())(x), 2 * x)


def forbid() -> None:
    """Save a tensor where the program allows no saved-tensor hooks."""
    with disable_saved_tensors_hooks("none here"):
        save()


def save() -> None:
    """Save a tensor."""
    torch.ones(3, requires_grad=True).exp()


def listed(program: Callable[[nn.Module], Any]) -> list[Any]:
    """Run a program watched; returns the lists of saved tensors."""
    log = Memory()
    with make_watch(log, WatchOptions("**", 10, None, False, StepAccount)):
        program(net())
    return [event for event in log.events if event["kind"] == "saved"]


@pytest.mark.parametrize("after", [transform, forbid, save])
def test_a_step_that_ends_in_a_backward_leaves_no_pair_behind(
    after: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch gives a thread its pairs back when a backward ends, also one that was removed during it."""

    def program(model: nn.Module) -> None:
        model(batch()).sum().backward()
        after()
        assert top(True) is None

    (event,) = listed(program)
    assert event["bytes"] == 240
    assert event["items"]
    assert capsys.readouterr().err == ""


def test_a_run_that_saves_nothing_leaves_no_pair_behind() -> None:
    """A list without entries is not written, and its hooks end with the watch."""

    def program(model: nn.Module) -> None:
        with torch.no_grad():
            model(batch())

    assert listed(program) == []
    assert top(True) is None


def test_a_backward_may_save_before_its_step_ends() -> None:
    """With ``create_graph`` a backward saves tensors; the gradients of the gradients are right."""

    def penalty(model: nn.Module) -> Tensor:
        x = torch.ones(5, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        found: Tensor = x.grad
        return found

    torch.manual_seed(0)
    plain = penalty(net())
    found: list[Tensor] = []
    torch.manual_seed(0)
    listed(lambda model: found.append(penalty(model)))
    assert torch.equal(found[0], plain)
