"""Checkpoints inside checkpoints: each value and gradient is one event, with the call that it has without checkpoints."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from tests.hook_tables import hook_tables

pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad"
)  # in an outer forward without grad

Modes = tuple[bool | None, ...]
NESTS = list(itertools.product((True, False), repeat=2))
DEEP = [*NESTS, (True, False, True), (True, True, True), (False, False, True)]
OBSERVED = "**:in, **:out, **:out.grad, **:in.grad, **:in.share, **:param, **:param.grad, **/*:out, **/*:out.grad, **/*:in.grad"


class Nest(nn.Module):
    """Runs a layer and an inner module in a checkpoint, as a part of its own forward."""

    def __init__(self, inner: nn.Module, mode: bool | None) -> None:
        super().__init__()
        self.pre, self.inner, self.post, self.mode = nn.Linear(4, 4), inner, nn.Linear(4, 4), mode

    def part(self, x: Tensor) -> Tensor:
        return self.inner(self.pre(x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x) if self.mode is None else checkpoint(self.part, x, use_reentrant=self.mode)
        return torch.relu(self.post(y)) + 1


def nest(modes: Modes) -> nn.Module:
    """Nested checkpoints of these kinds, the last outermost, with equal weights in each call."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for mode in modes:
        model = Nest(model, mode)
    return model


def events(modes: Modes, selector: str = OBSERVED) -> dict[tuple[Any, ...], Tensor]:
    """Every value that one forward and backward shows, by its event."""
    model, x = nest(modes), torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    with kedge.session() as s:
        h = s.hook(model, selector, kedge.record(keep=None, copy=True))
        (model(x) * torch.arange(4.0)).sum().backward()
    found = [r for site in {str(tap.site) for tap in h.taps} for r in h.records(site)]
    seen = {
        (str(r.event.site), r.event.call, r.event.pass_, r.event.backward): r.value for r in found
    }
    assert len(seen) == len(found), "an event came twice"
    return seen


@pytest.mark.parametrize("modes", DEEP, ids=str)
def test_each_event_of_nested_checkpoints_comes_once(modes: Modes) -> None:
    """Values and gradients in checkpoints of either kind inside others are the events of the plain model, each once."""
    plain, nested = events((None,) * len(modes)), events(modes)
    assert sorted(nested) == sorted(plain)
    assert all(torch.allclose(plain[event], value) for event, value in nested.items())


class Repeating(nn.Module):
    """Calls one layer, and one operation, in two outer checkpoints that hold two inner ones each."""

    def __init__(self, modes: Modes, *, between: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.modes, self.between = nn.Linear(4, 4), modes, between

    def run(self, depth: int, x: Tensor) -> Tensor:
        mode = self.modes[depth]
        function = self.outer if depth == 0 else self.inner
        return function(x) if mode is None else checkpoint(function, x, use_reentrant=mode)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))

    def outer(self, x: Tensor) -> Tensor:
        x = self.inner(x) if self.between else x
        for _ in range(2):
            x = self.run(1, x)
        return self.inner(x) if self.between else x

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.run(0, x)
        return self.fc(x)


@functools.cache
def edited(modes: Modes, selector: str, *, between: bool) -> list[Tensor]:
    """Output and gradients with an edit at a site."""
    model, x = (
        Repeating(modes, between=between),
        torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(),
    )
    with kedge.hook(model, selector, kedge.scale(1.5)):
        out = model(x)
        out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("modes", NESTS, ids=str)
@pytest.mark.parametrize("site", ["fc#{}", "fc#{}:in.grad", "/tanh#{}"])
@pytest.mark.parametrize("between", [True, False])
def test_an_edit_of_one_call_is_repeated_in_that_call_of_nested_checkpoints(
    modes: Modes, site: str, between: bool
) -> None:
    """An outer recompute calls the inner checkpoints again: an edit of call n is made in call n alone, in each of them."""
    for call in range(8 if between else 4):
        selector = site.format(call)
        plain, nested = (
            edited(kinds, selector, between=between) for kinds in ((None, None), modes)
        )
        assert all(map(torch.allclose, plain, nested)), selector


@pytest.mark.parametrize("modes", [(True,), (False,), *NESTS], ids=str)
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_session_that_ends_between_forward_and_backward_leaves_nothing(
    modes: Modes, recomputes: bool
) -> None:
    """The program's backward goes on as without the session, and no hook, mode or table stays."""
    model, plain = nest(modes), nest((None,) * len(modes))
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    expected = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
    before = hook_tables(model)
    session = kedge.session()
    h = session.hook(model, f"{OBSERVED}, **:saved", kedge.record(keep=None, recomputes=recomputes))
    loss = model(x).sum()
    session.end(quiet=True)
    known = {str(tap.site): tap.fired for tap in h.taps}
    loss.backward()

    assert all(map(torch.equal, expected, [p.grad for p in model.parameters()]))
    assert hook_tables(model) == before
    assert {str(tap.site): tap.fired for tap in h.taps} == known


@pytest.mark.parametrize("kind", ["out.grad", "in.share", "saved", "in.grad"])
def test_a_reentrant_checkpoint_without_its_backward_is_the_cause(kind: str) -> None:
    """Its forward runs without grad whatever the program does: the cause is the backward that did not run here."""
    model, x = nest((True,)), torch.randn(3, 4, requires_grad=True)
    session = kedge.session()
    session.hook(model, f"inner.0:{kind}", kedge.record())
    model(x).sum()
    ledger = session.ledger()
    session.end(quiet=True)

    assert "ran in a checkpoint" in ledger[f"inner.0:{kind}"].cause.why
