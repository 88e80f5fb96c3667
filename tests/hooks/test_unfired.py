"""Causes of sites that never fired, where the program changes the model in the block."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

import kedge

KINDS = "a, a:in, a:out.grad, a.0, a.0:saved, a/relu, a.0/linear, a.0.weight:param"


class Part(nn.Sequential):
    """A layer and an operation."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Replacing(nn.Module):
    """Makes one of its children anew in each forward, as some attention layers of big_bird do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Part(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.a = Part()
        return self.b(self.a(x))


@pytest.mark.parametrize("site", KINDS.split(", "))
def test_a_module_that_the_forward_replaces_is_the_cause(site: str) -> None:
    """The path is called, but the hooked object is not there any more."""
    model = Replacing()
    s = kedge.session()
    s.hook(model, f"{site}, b", kedge.record())
    model(torch.randn(1, 2)).sum().backward()
    ledger = s.ledger()
    s.end(quiet=True)

    assert ledger["b"].fired == 1
    cause = next(entry.cause for entry in ledger if entry.site.path != "b")
    assert cause.why.startswith("another module is at its path now")


def test_a_module_that_is_removed_has_that_cause() -> None:
    """Neither it nor what was inside it is part of the model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
    s = kedge.session()
    s.hook(model, "**", kedge.record())
    model[1] = None
    s.hook(model, "0", kedge.record())
    model[0](torch.randn(1, 2))
    ledger = s.ledger()
    s.end(quiet=True)
    assert {ledger[site].cause.why for site in ("1", "1.0")} == {"it is no longer part of the model"}


@pytest.mark.parametrize("site", ["0:out.grad", "0.weight:param.grad", "1"])
def test_an_action_that_raised_is_the_cause(site: str) -> None:
    """Also in a backward, which did reach the site."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    s = kedge.session()
    s.hook(model, site, lambda value: value[:1])
    with pytest.raises(kedge.errors.EditError):
        model(torch.randn(3, 2)).sum().backward()
    cause = s.ledger()[site].cause
    s.end(quiet=True)

    assert cause == ("its action raised an error each time", "see the error")


def test_the_gradient_of_an_input_says_how_to_get_it() -> None:
    """An input has a gradient only if it requires one."""
    model = nn.Sequential(nn.Linear(2, 2))
    s = kedge.session()
    s.hook(model, ":in.grad", kedge.record())
    model(torch.randn(3, 2)).sum().backward()
    cause = s.ledger()[":in.grad"].cause
    s.end(quiet=True)

    assert cause.remedy.endswith("; an input of the model needs requires_grad_()")


class ManyUnused(nn.Module):
    """Calls none of many modules, and reads an attribute of one."""

    def __init__(self, number: int) -> None:
        super().__init__()
        for i in range(number):
            setattr(self, f"m{i}", nn.Dropout(0.5))
        self.used = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) * self.m1.p


def test_the_source_of_a_class_is_parsed_once_for_all_its_silent_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the class and once its forward, however many sites and sessions are explained."""
    read, source_of = [], inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda of: read.append(of) or source_of(of))
    model = ManyUnused(40)
    for _ in range(2):
        with kedge.session() as s:
            s.hook(model, "*", kedge.record())
            model(torch.ones(1, 2))
            ledger = s.ledger()
            s.end(quiet=True)
    assert read.count(ManyUnused) == read.count(ManyUnused.forward) == 1
    assert ledger["m1"].cause.why == "bypassed: ManyUnused uses its p without calling it"
    assert ledger["m2"].cause.why == "never called while the hook was attached"


def test_a_session_that_ends_quietly_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a watched run, whose ledger has been written by then."""
    s = kedge.session()
    s.hook(ManyUnused(3), "*", kedge.record())
    monkeypatch.setattr("kedge.hooks.ledger.explain", lambda tap, session: pytest.fail("explained"))
    s.end(quiet=True)
