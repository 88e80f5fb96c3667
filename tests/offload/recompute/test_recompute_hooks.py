"""Kedge's own hooks on a model whose modules are run again: each value is one event, and edits are repeated."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from tests.hook_tables import hook_tables

OBSERVED = "**:in, **:out, **:out.grad, **:in.grad, **:in.share, **:param, **:param.grad, **/*:out, **/*:out.grad"
NAMED = ["inner", "inner.*", "inner, inner.fc", "**", "", "inner.fc", "inner.last, inner.act"]


class Inner(nn.Module):
    """Calls one layer twice, and another once."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.last = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.fc(self.act(self.fc(x)))))


class Net(nn.Module):
    """Calls an inner module twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pre, self.inner, self.post = nn.Linear(4, 4), Inner(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.post(self.inner(torch.sigmoid(self.inner(self.pre(x)))))


def step(model: nn.Module) -> list[Tensor]:
    """Return the gradients of one step, and the output."""
    model.zero_grad()
    out = model(torch.linspace(-1, 1, 12).view(3, 4).requires_grad_())
    (out * torch.arange(4.0)).sum().backward()
    return [out.detach(), *(param.grad.clone() for param in model.parameters())]


def events(
    recompute: str | None, *, offload_first: bool
) -> tuple[dict[tuple[Any, ...], Tensor], Any]:
    """Return every value that two steps show, by its event, and the gradients."""
    model = Net()
    tables = hook_tables(model)
    with ExitStack() as stack:
        if offload_first:
            stack.enter_context(kedge.offload(model, recompute=recompute, min_bytes=0))
        s = stack.enter_context(kedge.session())
        h = s.hook(model, OBSERVED, kedge.record(keep=None, copy=True))
        if not offload_first:
            stack.enter_context(kedge.offload(model, recompute=recompute, min_bytes=0))
        grads = [step(model), step(model)]
    assert hook_tables(model) == tables
    found = [r for site in {str(tap.site) for tap in h.taps} for r in h.records(site)]
    seen = {
        (str(r.event.site), r.event.call, r.event.pass_, r.event.backward): r.value for r in found
    }
    assert len(seen) == len(found), "an event came twice"
    return seen, grads


@pytest.mark.parametrize("offload_first", [True, False])
@pytest.mark.parametrize("recompute", NAMED)
def test_each_event_comes_once(recompute: str, offload_first: bool) -> None:
    """Events and values are those without recomputing, whichever block is the outer one."""
    plain, grads = events(None, offload_first=offload_first)
    found, same = events(recompute, offload_first=offload_first)
    assert sorted(found) == sorted(plain)
    assert all(torch.equal(plain[event], value) for event, value in found.items())
    for one, other in zip(grads, same, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("offload_first", [True, False])
@pytest.mark.parametrize("recompute", NAMED)
@pytest.mark.parametrize(
    "selector",
    [
        "inner",
        "inner:in",
        "inner#1",
        "inner#0:in",
        "inner.fc#1",
        "inner.fc#2:in",
        "inner.act:out.grad",
        "inner.fc:in.grad",
        "inner.last",
        "inner/relu",
    ],
)
def test_edits_are_repeated(selector: str, recompute: str, offload_first: bool) -> None:
    """An edit changes the same calls, so gradients are those of the edited bare model."""
    results = []
    for named in (None, recompute):
        model = Net()
        with ExitStack() as stack:
            if offload_first:
                stack.enter_context(kedge.offload(model, recompute=named, min_bytes=0))
            s = stack.enter_context(kedge.session())
            s.hook(model, selector, lambda v: v * 1.5 + 0.1, kedge.record())
            if not offload_first:
                stack.enter_context(kedge.offload(model, recompute=named, min_bytes=0))
            results.append([step(model), step(model)])
    for one, other in zip(*results, strict=True):
        assert all(map(torch.equal, one, other))


def test_recomputes_are_labelled() -> None:
    """A recompute is an event of the same pass and call."""
    model = Net()
    with kedge.session() as s, kedge.offload(model, recompute="inner", min_bytes=0):
        h = s.hook(model, "inner.fc:in", kedge.record(keep=None, recomputes=True))
        step(model)
    found = [(r.event.call, r.event.recompute) for r in h.records("inner.fc:in")]
    assert sorted(found) == [(call, again) for call in range(4) for again in (False, True)]
