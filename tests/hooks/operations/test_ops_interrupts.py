"""Operations after an interrupt that the program catches in the same forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.flow import Event


class Stop(BaseException):
    """An interrupt: PyTorch calls no forward hook when it passes through a module."""


class Catching(nn.Module):
    """Catches interrupts of an operation and of a child, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.later = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = torch.relu(x)
        except Stop:
            x = x + 1
        try:
            x = self.child(torch.sigmoid(x))
        except Stop:
            x = torch.tanh(x)
        return torch.relu(self.later(torch.exp(x)))


def stop_once() -> Callable[[Tensor], None]:
    """An action that raises an interrupt at its first call."""
    calls = []

    def action(value: Tensor) -> None:
        calls.append(value)
        if len(calls) == 1:
            raise Stop

    return action


def fired(where: str, selector: str) -> dict[str, int]:
    """How often each operation of the outer module fires after an interrupt at a site; no mode stays."""
    model = nn.Sequential(Catching())
    counts: dict[str, int] = {}

    def count(value: Tensor, event: Event) -> None:
        if event.site.path == "0":
            counts[event.site.op[0]] = counts.get(event.site.op[0], 0) + 1

    s = kedge.session()
    s.hook(model, selector, count)
    s.hook(model, where, stop_once())
    model(torch.ones(2, 4))
    assert torch._C._len_torch_function_stack() == 0
    s.end(quiet=True)
    return counts


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("0/relu#0:in", {"add": 1, "sigmoid": 1, "exp": 1, "relu": 1}),
        ("0/relu#0:out", {"relu": 2, "add": 1, "sigmoid": 1, "exp": 1}),
        ("0.child.0/linear:in", {"relu": 2, "sigmoid": 1, "tanh": 1, "exp": 1}),
        ("0.child.0/linear:out", {"relu": 2, "sigmoid": 1, "tanh": 1, "exp": 1}),
        ("0.child.0:in", {"relu": 2, "sigmoid": 1, "tanh": 1, "exp": 1}),
    ],
)
def test_later_operations_of_a_forward_that_catches_an_interrupt_are_seen(
    where: str, expected: dict[str, int]
) -> None:
    """Whether an action at an operation, at a child's operation or at a module raised it."""
    assert fired(where, "0/*, 0.child/*, 0.child.0/*") == expected


def test_operations_after_an_interrupt_in_an_unhooked_child_are_seen_from_the_next_call_on() -> (
    None
):
    """While a child that is not hooked runs, nothing is seen; the next call of a module shows that it is over."""
    seen = fired("0.child.0:in", "0/*")
    assert {name: seen.get(name) for name in ("sigmoid", "relu")} == {"sigmoid": 1, "relu": 2}
    assert "tanh" not in seen


def test_an_operation_that_an_interrupt_hid_has_that_cause() -> None:
    """The ledger does not say that the forward made no such operation."""
    model = nn.Sequential(Catching())
    s = kedge.session()
    s.hook(model, "0/tanh, 0/gelu", kedge.record())
    s.hook(model, "0.child.0:in", stop_once())
    model(torch.ones(2, 4))
    ledger = s.ledger()
    s.end(quiet=True)
    assert "an interrupt ended a call inside it" in ledger["0/tanh"].cause.why


def test_an_operation_whose_action_always_raised_has_that_cause() -> None:
    """It was made, and ended by the error."""

    def stop(value: Tensor) -> None:
        raise Stop

    model = Catching()
    s = kedge.session()
    s.hook(model, "/sigmoid:in", stop)
    model(torch.ones(2, 4))
    ledger = s.ledger()
    s.end(quiet=True)
    assert ledger["/sigmoid:in"].cause.why == "its sigmoid raised an error each time"
