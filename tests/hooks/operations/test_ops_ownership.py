"""Whose operation it is: that of the innermost module under way, however it is held and called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kedge


class Child(nn.Module):
    """One operation."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Parent(nn.Module):
    """Calls its child in a way that is given, between two operations of its own."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.child = Child()
        self.deep = nn.ModuleDict({"list": nn.ModuleList([nn.Sequential(Child())])})
        self.plain = [Child()]
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.call(self, torch.cos(x)))


def seen(model: nn.Module, *args: Any, sites: str = "/*:out") -> list[str]:
    """The operations at the root of a model, by name, in one forward."""
    with kedge.session() as s:
        s.hook(model, sites, lambda value: None)
        model(*args)
        return [event.site.op[0] for event, _ in s.timeline()]


STRANGER = Child()


def test_a_childs_operations_are_not_its_parents() -> None:
    """Children, grandchildren called directly, modules in plain lists and of nobody: their operations are their own."""
    calls: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "child": lambda m, x: m.child(x),
        "grandchild": lambda m, x: m.deep["list"][0][0](x),
        "through a sequence": lambda m, x: m.deep["list"][0](x),
        "plain list": lambda m, x: m.plain[0](x),
        "stranger": lambda m, x: STRANGER(x),
        "made here": lambda m, x: Child()(x),
    }
    for how, call in calls.items():
        assert seen(Parent(call), torch.ones(2)) == ["cos", "sin"], how


def test_a_forward_called_directly_is_no_call_of_a_module() -> None:
    """What `child.forward(x)` makes belongs to the module that is under way, as PyTorch runs no hook there."""
    assert seen(Parent(lambda m, x: m.child.forward(x)), torch.ones(2)) == ["cos", "tanh", "sin"]


def test_functions_and_comprehensions_belong_to_the_module() -> None:
    """Operations in functions that a forward calls are its own."""
    assert seen(Parent(lambda m, x: sum((t.exp() for t in (x, x)), x)), torch.ones(2)) == [
        "cos", "exp", "add", "exp", "add", "sin"
    ]  # fmt: skip


def test_both_may_be_asked_for() -> None:
    """With parent and child hooked, each operation fires once, at its own module."""
    model = Parent(lambda m, x: m.child(x) + m.plain[0](x))
    with kedge.session() as s:
        s.hook(model, "child/*:out, /*:out", lambda value: None)
        model(torch.ones(2))
        assert s.timeline().sites == ["/cos#0:out", "child/tanh#0:out", "/add#0:out", "/sin#0:out"]


def test_a_child_hooked_before_its_parent() -> None:
    """The order in which modules are hooked makes no difference to whose an operation is."""
    model = Parent(lambda m, x: m.child(x))
    with kedge.session() as s:
        s.hook(model, "child/*:out", lambda value: None)
        s.hook(model, "/*:out", lambda value: None)
        model(torch.ones(2))
        assert s.timeline().sites == ["/cos#0:out", "child/tanh#0:out", "/sin#0:out"]


def test_a_module_that_calls_itself() -> None:
    """Each call of a recursive module has operations of its own, counted from 0."""

    class Recursive(nn.Module):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            x = torch.cos(x)
            x = self(x, depth - 1) if depth else x
            return torch.sin(x)

    model = nn.ModuleDict({"it": Recursive()})
    model.forward = lambda x: model["it"](x, 2)  # type: ignore[method-assign]
    with kedge.session() as s:
        acts = s.hook(model, "it/*:out", kedge.record())
        model(torch.ones(2))
        got = [(str(e.site), e.call) for e, _ in s.timeline()]
    assert got == [("it/cos#0:out", n) for n in range(3)] + [("it/sin#0:out", n) for n in (2, 1, 0)]
    assert torch.equal(acts["it#2/cos"], torch.ones(2).cos().cos().cos())


def test_what_hooks_and_actions_compute_is_nobodys() -> None:
    """Operations of actions and of the program's own hooks on the module are not operations of its forward."""
    model = Parent(lambda m, x: m.child(x))
    own = [
        model.register_forward_pre_hook(lambda m, args: (args[0].exp(),)),
        model.register_forward_hook(lambda m, args, out: out.abs()),
        model.child.register_forward_hook(lambda m, args, out: out.neg()),
    ]
    with kedge.session() as s:
        s.hook(model, ":out", lambda v: v.clamp(min=0))
        s.hook(model, "/*:out", lambda v: v.mul(2))
        own.append(model.register_forward_pre_hook(lambda m, args: (args[0].exp(),)))
        s.hook(model, "child:in", lambda v: v.square())
        model(torch.ones(2, requires_grad=True))
        ops = [e.site.op[0] for e, _ in s.timeline() if e.site.op]
    for handle in own:
        handle.remove()
    assert ops == ["cos", "sin"]


def test_two_sessions_see_the_same() -> None:
    """Sessions on the same module each see its operations, and not what the other's actions compute."""
    model = Parent(lambda m, x: m.child(x))
    with kedge.session() as first, kedge.session() as second:
        a = first.hook(model, "/*:out, /*:out.grad", kedge.measure())
        b = second.hook(model, "/*:out, /*:in, /*:out.grad", lambda v: v.mul(1))
        first.hook(model, "child/tanh", torch.relu)
        model(torch.ones(2, requires_grad=True)).sum().backward()
        names = ["/cos#0", "/sin#0"]
        assert [s for s in first.timeline().sites if s.endswith(":out")] == [
            "/cos#0:out", "child/tanh#0:out", "/sin#0:out"
        ]  # fmt: skip
        assert [
            s.removesuffix(":out") for s in second.timeline().sites if s.endswith(":out")
        ] == names
    assert a.ledger()["/*"].fired == b.ledger()["/*"].fired == 2


def test_ended_and_begun_within_a_forward() -> None:
    """A session that begins or ends while a hooked forward runs leaves the other's operations as they are."""
    inner: list[Any] = []

    def call(m: Any, x: Tensor) -> Tensor:
        with kedge.session() as s:
            s.hook(m, "/*:out", lambda value: None)
            x = F.relu(x)
            inner.extend(s.timeline().sites)
            s.taps.clear()
        return x

    assert seen(Parent(call), torch.ones(2)) == ["cos", "relu", "sin"]
    assert inner == []
