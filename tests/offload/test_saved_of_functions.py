"""``kedge.saved`` of a function: rows by operation, or by the modules that it reaches; the program is left as it was."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import NoSuchKind
from kedge.offload.account.tensors import SavedTensors


def net() -> nn.Sequential:
    """Make a small network with buffers that a forward changes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.ReLU())


def rows(account: SavedTensors) -> dict[str | None, int]:
    """Return the bytes of each operation."""
    return {sums.path: sums.bytes for sums in account.by_operation()}


def test_a_lambda_is_called_at_once_and_its_rows_are_operations() -> None:
    """The account has each operation with its name for the tensor, and prints them instead of modules."""
    x, w = torch.randn(50, 30), torch.randn(30, 40, requires_grad=True)
    account = kedge.saved(lambda: (x @ w).relu().exp())

    assert rows(account) == {
        "MmBackward0 (self)": 6000,
        "ReluBackward0 (result)": 8000,
        "ExpBackward0 (result)": 8000,
    }
    assert [item.origin for item in account.items] == ["input", "made", "made"]
    assert "by operation" not in str(account)
    assert "\nExpBackward0 (result)" in str(account)
    assert "(outside of modules)" not in str(account).partition("operation ")[2]
    assert "ExpBackward0 (result)" in account._repr_html_()
    assert account.by_line()[0].text.startswith("account = kedge.saved")


def test_a_function_with_parameters_waits_for_its_arguments() -> None:
    """As a model does; builtins, too. What it returns until then says so."""
    w = torch.randn(3, requires_grad=True)

    def scaled(x: Tensor, *, by: int) -> Tensor:
        return (x * w).exp() * by

    waiting = kedge.saved(scaled)
    assert repr(waiting) == (
        "<kedge.saved of test_a_function_with_parameters_waits_for_its_arguments.<locals>.scaled: call this with its "
        "arguments for the account>"
    )
    assert [item.origin for item in waiting(torch.ones(3), by=2).items] == ["input", "made"]
    assert len(kedge.saved(torch.exp)(w).items) == 1
    assert len(kedge.saved(functools.partial(scaled, torch.ones(3), by=2)).items) == 2
    assert len(kedge.saved(lambda x=w: x.exp()).items) == 1


@pytest.mark.parametrize("backward", [False, True])
def test_a_function_that_calls_a_model_has_the_same_account_as_the_model(backward: bool) -> None:
    """The rows are its modules, under the name that the model has in the function."""
    model, x = net(), torch.randn(50, 30)
    by_function = kedge.saved(lambda: model(x).pow(2).sum(), backward=backward)
    by_model = kedge.saved(model, loss=lambda out: out.pow(2).sum(), backward=backward)(x)

    assert by_function.total == by_model.total
    assert (by_function.parameters, by_function.inputs) == (by_model.parameters, by_model.inputs)
    assert [s.path for s in by_function.by_module(inner=True)] == [
        "model",
        "model.0",
        "model.1",
        "model.2",
        None,
    ]
    assert [s.checkpoint for s in by_function.by_module(inner=True)] == [
        s.checkpoint for s in by_model.by_module(inner=True)
    ]
    assert by_function.timeline.bytes == by_model.timeline.bytes


class Trainer:
    """Holds a model and a loose weight."""

    def __init__(self) -> None:
        self.model, self.half = net(), nn.Linear(40, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def loss(self, x: Tensor) -> Tensor:
        """Compute a loss."""
        return (self.half(self.model(x)) * self.scale).sum()


def test_the_modules_of_a_bound_methods_object_are_rows() -> None:
    """So for an object, for a module's own method, and for an object that a lambda names."""
    trainer, x = Trainer(), torch.randn(5, 30)
    paths = {sums.path for sums in kedge.saved(trainer.loss)(x).by_module()}
    assert paths == {"self.model.0", "self.model.1", "self.model.2", "self.half_", None}
    assert {s.path for s in kedge.saved(lambda: trainer.loss(x)).by_module()} == {
        *("trainer.model.0", "trainer.model.1", "trainer.model.2", "trainer.half_", None)
    }
    loose = [
        item
        for item in kedge.saved(trainer.loss)(x).items
        if item.path is None and item.field == "other"
    ]
    assert [(item.shape, item.origin) for item in loose] == [((2,), "parameter")]
    assert {s.path for s in kedge.saved(trainer.model.forward)(x).by_module()} == {"0", "1", "2"}


def test_a_function_that_runs_its_own_backward_has_the_account_of_the_peak() -> None:
    """Nothing is held at its end."""
    w = torch.ones(10, requires_grad=True)

    def step() -> float:
        loss = w.exp().sin().sum()
        loss.backward()
        return loss.item()

    account = kedge.saved(step)
    assert rows(account) == {"ExpBackward0 (result)": 40}
    assert w.grad is not None


def test_nothing_is_changed_or_kept() -> None:
    """Random numbers, buffers, gradients and older graphs are as before; no tensor of the call outlives it."""
    model, x, made = net(), torch.randn(50, 30), []

    def loss() -> Tensor:
        out = model(x)
        made.append(weakref.ref(out))
        return (out * torch.rand(40)).sum()

    state, buffers = torch.get_rng_state(), [b.clone() for b in model.buffers()]
    gc.collect()
    gc.disable()
    try:
        kedge.saved(loss, backward=True)
        assert made[0]() is None
    finally:
        gc.enable()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.buffers(), buffers))
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_backward_ends_where_the_function_begins() -> None:
    """A graph that existed before is not freed."""
    w = torch.ones(3, requires_grad=True)
    before = (w * 2).exp()
    course = kedge.saved(lambda: before.exp().sin(), backward=True).timeline

    assert course.bytes[-1] == 0
    before.sum().backward()
    assert w.grad is not None


def test_what_saves_nothing_says_so() -> None:
    """No tensor requires grad, or no operation needs one."""
    x = torch.ones(3)
    for account in (
        kedge.saved(lambda: x.exp()),
        kedge.saved(lambda: (x.requires_grad_() + 1).sum()),
    ):
        assert str(account).startswith("autograd saved nothing: ")
        assert "autograd saved nothing" in account._repr_html_()


def test_a_function_that_switches_gradients_off_saves_nothing_and_the_report_names_that() -> None:
    """As a decorated ``predict`` does."""
    w = torch.ones(3, requires_grad=True)

    assert "or they ran under torch.no_grad" in str(kedge.saved(torch.no_grad()(lambda: w.exp())))


def test_gradients_are_on_for_the_call_as_for_a_model() -> None:
    """Under ``no_grad`` and in inference mode."""
    w = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert len(kedge.saved(lambda: w.exp()).items) == 1
    with torch.inference_mode():
        assert len(kedge.saved(lambda: w.exp()).items) == 1


def test_an_error_of_the_function_is_its_own() -> None:
    """It passes through, and no hook is left."""

    def fails() -> None:
        torch.ones(2, requires_grad=True).exp()
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        kedge.saved(fails)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize(
    ("what", "said"),
    [(3, "not 3"), (nn.Linear, "not the class Linear"), (torch.ones(2), "not a Tensor")],
)
def test_anything_else_is_refused(what: Any, said: str) -> None:
    """The message shows what to give."""
    with pytest.raises(NoSuchKind, match=rf"{said}; .*kedge.saved\(lambda: x.exp\(\)\)"):
        kedge.saved(what)
