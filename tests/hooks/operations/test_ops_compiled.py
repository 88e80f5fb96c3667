"""Operations and code that is not called one by one: compiled, scripted, traced, transformed."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kedge
from kedge.testing import assert_hooks_restored

pytestmark = pytest.mark.filterwarnings("ignore::kedge.errors.Recompiled")
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


class Block(nn.Module):
    """A linear layer and a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x)) * 2


class Net(nn.Module):
    """Two blocks and an operation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.sin(self.one(x))).sum()


def both(make: Callable[[nn.Module], Any], sites: str, *actions: Any) -> tuple[Any, Any, Any, Any]:
    """Losses and gradients without hooks and with, and the hook's ledger."""
    plain = Net()
    hooked = copy.deepcopy(plain)
    x = torch.randn(2, 3)
    results = []
    run = make(plain)
    expected = run(x)
    expected.backward()
    s = kedge.session()
    acts = s.hook(hooked, sites, *actions)
    run = make(hooked)
    for _ in range(2):
        hooked.zero_grad()
        got = run(x)
        got.backward()
    ledger = s.ledger()
    s.end(quiet=True)
    same = torch.equal(expected, got)
    results = [
        torch.equal(p.grad, q.grad)
        for p, q in zip(plain.parameters(), hooked.parameters(), strict=True)
    ]
    return same and all(results), acts, ledger, hooked


@BACKENDS
def test_a_compiled_model_says_that_it_is(backend: str, compiled: Callable[..., Any]) -> None:
    """An operation inside compiled code is not seen; values and gradients stay, and the ledger says why."""
    same, _, ledger, _ = both(
        lambda m: compiled(m, backend=backend), "one/relu, /sin", lambda v: v * 5
    )
    assert same
    for site in ("one/relu", "/sin"):
        assert "compiled code" in ledger[site].cause.why


@BACKENDS
def test_a_compiled_child_leaves_the_parents_operations(
    backend: str, compiled: Callable[..., Any]
) -> None:
    """A hooked forward that calls a compiled module keeps its values, and its own operations are seen."""

    def make(net: Any) -> Any:
        net.one.compile(backend=backend)
        return net

    same, acts, ledger, _ = both(make, "/*:out, one/relu:out", kedge.record())
    assert same
    assert ledger["/*"].fired == 4
    assert acts["/sin"].shape == (2, 3)
    assert "compiled code" in ledger["one/relu"].cause.why


@BACKENDS
def test_a_compiled_function_in_a_hooked_forward(
    backend: str, compiled: Callable[..., Any]
) -> None:
    """A forward that calls a compiled function keeps its values with and without the mode, called again and again."""
    double = compiled(lambda x: F.relu(x) * 2 + 1, backend=backend, fullgraph=True)

    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(double(torch.cos(x)))

    model, x = Calls(), torch.randn(3, requires_grad=True)
    expected = torch.sin(F.relu(torch.cos(x)) * 2 + 1)
    for _ in range(2):
        with kedge.hook(model, "/sin:out, /cos:out, /sin:out.grad", kedge.record()) as acts:
            out = model(x)
            out.sum().backward()
        assert torch.equal(out, expected)
        assert torch.equal(acts["/sin:out"], expected)
        assert torch.equal(model(x), expected)
    assert torch._C._len_torch_function_stack() == 0


def test_a_compiled_forward_says_that_it_is(compiled: Callable[..., Any]) -> None:
    """A module of which only the forward was compiled is told apart from one that makes no such operation."""

    def make(net: Any) -> Any:
        net.one.forward = compiled(net.one.forward, backend="aot_eager")
        return net

    same, _, ledger, _ = both(make, "one/relu:out", kedge.record())
    assert same
    entry = ledger["one/relu"]
    assert entry.fired or "compiled code" in entry.cause.why


def test_a_scripted_module_says_that_it_is() -> None:
    """TorchScript runs without Python; its values stay and the ledger says why nothing was seen."""

    def make(net: Any) -> Any:
        return net

    plain = Net()
    plain.one = torch.jit.script(plain.one)
    x = torch.randn(2, 3)
    expected = make(plain)(x)
    s = kedge.session()
    s.hook(plain, "**/relu, /sin", kedge.record())
    assert torch.equal(plain(x), expected)
    ledger = s.ledger()
    s.end(quiet=True)
    assert "scripted" in ledger["one/relu"].cause.why
    assert ledger["/sin"].fired == 1


def test_a_hooked_model_can_be_traced_exported_copied_and_pickled() -> None:
    """What is made of a model with operations hooked is what is made of one without."""
    net, x = Net(), torch.randn(2, 3)
    expected = net(x)
    with assert_hooks_restored(net), kedge.session() as s:
        s.hook(net, "**/*:out", lambda v: None)
        traced = torch.jit.trace(net, (x,))
        exported = torch.export.export(net, (x,), strict=False)
        twin, loaded = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
        saved = io.BytesIO()
        torch.save(net, saved)
        net(x)
    for other in (traced, exported.module(), twin, loaded):
        assert torch.equal(other(x), expected)
    assert not twin.one._forward_pre_hooks
    assert not loaded.one._forward_hooks


def test_operations_under_vmap_and_grad() -> None:
    """In `torch.func` transforms operations fire, and the results are those without hooks."""
    net, x = Net(), torch.randn(4, 3)
    params = dict(net.named_parameters())

    def loss(p: Any, row: Tensor) -> Tensor:
        return torch.func.functional_call(net, p, (row,))

    expected = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    with kedge.session() as s:
        s.hook(net, "**/*:out", lambda v: None)
        got = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
        assert "/sin#0:out" in s.timeline().sites
    assert all(torch.equal(got[name], expected[name]) for name in expected)
