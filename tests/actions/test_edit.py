"""Edits alone: what each returns, and that none touches what it was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import ActionArity
from kedge.flow import as_act

X = torch.tensor([[-2.0, 0.0], [1.0, 3.0]])
VECTOR = torch.tensor([1.0, 10.0])


@pytest.mark.parametrize(
    ("edit", "expected", "name"),
    [
        (kedge.replace(1), torch.ones(2, 2), "replace(1)"),
        (kedge.replace(X + 1), X + 1, "replace(tensor)"),
        (kedge.replace(torch.neg), -X, "replace(neg)"),
        (kedge.scale(2), X * 2, "scale(2)"),
        (kedge.scale(VECTOR), X * VECTOR, "scale(tensor[2])"),
        (kedge.add(0.5), X + 0.5, "add(0.5)"),
        (kedge.add(VECTOR), X + VECTOR, "add(tensor[2])"),
        (kedge.clamp(min=0), X.clamp(min=0), "clamp(min=0)"),
        (kedge.clamp(max=1), X.clamp(max=1), "clamp(max=1)"),
        (kedge.clamp(min=-1, max=1), X.clamp(-1, 1), "clamp(min=-1, max=1)"),
        (kedge.clamp(-1, 1), X.clamp(-1, 1), "clamp(min=-1, max=1)"),
        (kedge.zero(), torch.zeros(2, 2), "zero()"),
    ],
)
def test_an_edit_returns_a_new_tensor_and_prints_as_written(
    edit: Any, expected: Tensor, name: str
) -> None:
    """The given tensor is not changed; shape, dtype and device are kept; messages show the edit as one writes it."""
    before = X.clone()
    result = edit(X)

    assert torch.equal(result, expected)
    assert result is not X
    assert torch.equal(X, before)
    assert repr(edit) == name


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.complex64]
)
@pytest.mark.parametrize("edit", [kedge.replace(1), kedge.scale(2), kedge.add(1), kedge.zero()])
def test_an_edit_keeps_the_dtype(edit: Any, dtype: torch.dtype) -> None:
    """Whole numbers do not promote the value they edit."""
    assert edit(torch.ones(2).to(dtype)).dtype is dtype


def test_a_replacement_stays_as_it_is_if_the_model_works_in_place() -> None:
    """Each call gets the given tensor, as with an addition in place behind the layer, and a leaf gets its gradient."""

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            y += 1
            return y

    model, new = Adding(), torch.zeros(2, 2, requires_grad=True)
    with kedge.hook(model, "layer", kedge.replace(new)):
        first, second = model(X), model(X)
    (first + second).sum().backward()

    assert torch.equal(first, torch.ones(2, 2))
    assert torch.equal(second, torch.ones(2, 2))
    assert torch.equal(new, torch.zeros(2, 2))
    assert torch.equal(new.grad, torch.full((2, 2), 2.0))


def test_a_clamp_without_limits_is_refused() -> None:
    """The message says what to give."""
    with pytest.raises(
        ValueError, match=r"^clamp\(\) without limits changes nothing; pass min, max or both$"
    ):
        kedge.clamp()


def one(value: Tensor) -> Tensor:
    """Take the value."""
    return value


def with_event(value: Tensor, event: Any) -> Any:
    """Take the value and the event."""
    return event


def with_default(value: Tensor, factor: float = 2.0) -> float:
    """An action with an option, which is no event."""
    return factor


def optional_event(value: Tensor, event: Any = None) -> Any:
    """Take the event if there is one."""
    return event


class Doubling:
    """An action with a state."""

    def __call__(self, value: Tensor) -> Tensor:
        return value

    def method(self, value: Tensor, event: Any) -> Any:
        """A bound method that serves as an action."""
        return event


@pytest.mark.parametrize(
    ("action", "gets_event"),
    [
        (one, False),
        (with_event, True),
        (with_default, False),
        (optional_event, True),
        (lambda *args: args[-1], False),
        (lambda v, *rest: v, False),
        (torch.zeros_like, False),
        (torch.relu, False),
        (Doubling(), False),
        (Doubling().method, True),
    ],
)
def test_an_action_takes_the_value_and_the_event_if_it_asks_for_it(
    action: Any, gets_event: bool
) -> None:
    """A second place that has no default, or is called `event`, gets the event; everything else the value alone."""
    result = as_act(action)(X, "event")

    assert (isinstance(result, str) and result == "event") is gets_event


@pytest.mark.parametrize(
    "action", [lambda: None, lambda a, b, c: None, lambda v, *, k: None, lambda *, v: None]
)
def test_an_action_that_cannot_be_called_is_refused(action: Any) -> None:
    """Nothing but (value) or (value, event) is called."""
    with pytest.raises(
        ActionArity,
        match="an action takes \\(value\\) or \\(value, event\\), everything else needs a default",
    ):
        as_act(action)
