"""`kedge.offload()` without a model: whatever this thread saves."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.errors import OffloadError

MODES: dict[str, dict[str, Any]] = {
    "rebuild": {},
    "disk": {"to": kedge.Disk()},
    "disk alone": {"to": kedge.Disk(rebuild=False, checksum=True)},
}
X = torch.linspace(-2, 2, 64 * 32).view(64, 32)


def params() -> list[Tensor]:
    """Return the weights of a function."""
    torch.manual_seed(0)
    return [torch.randn(32, 32, requires_grad=True) for _ in range(3)]


def grads(weights: list[Tensor], x: Tensor = X) -> list[Tensor]:
    """Run a step of functions alone, and return all gradients."""
    y = x
    for weight in weights:
        y = F.gelu(y @ weight)
    y = checkpoint(lambda z: (z @ weights[0]).sin(), y, use_reentrant=False)
    loss = F.cross_entropy(y, torch.arange(64) % 32)
    return list(torch.autograd.grad(loss, weights))


@pytest.mark.parametrize("mode", MODES)
def test_what_functions_save_is_offloaded(mode: str) -> None:
    """Gradients keep their bits over several steps, and leaves that require gradients stay where they are."""
    weights = params()
    plain = grads(weights)
    with kedge.offload(min_bytes=1, **MODES[mode]) as account:
        for _ in range(3):
            assert all(map(torch.equal, grads(weights), plain))
    total = account.total
    assert set(account.rows) == {None}
    assert total.kept["input"].number == 3 * (
        len(weights) - 1
    )  # the first one's gradient does not need it
    assert bool(total.rebuilt) is (mode != "disk alone")
    assert bool(total.moved) is ("disk" in mode)


def test_parameters_of_models_stay_and_their_modules_are_not_told_apart() -> None:
    """A model called in the block has one row with all others."""
    net = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    with kedge.offload(to=kedge.Disk(rebuild=False), min_bytes=1) as account:
        net(X).sum().backward()
    assert set(account.rows) == {None}
    assert account.total.kept["parameter"].number == 1
    assert account.total.moved["disk"].bytes >= X.nbytes
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in net.modules())


def test_blocks_without_a_model_open_again_nest_and_are_of_one_thread() -> None:
    """Another thread saves as without Kedge; a block can be opened again, but not within itself."""
    weights = params()
    plain = grads(weights)
    block = kedge.offload(to=kedge.Disk(rebuild=False), min_bytes=1)
    with block as account:
        thread = threading.Thread(target=grads, args=(weights,))
        thread.start()
        thread.join()
        assert not account.total.packs
        with pytest.raises(OffloadError, match="open already"):
            block.__enter__()
    with block as again, kedge.offload(min_bytes=1) as inner:
        assert all(map(torch.equal, grads(weights), plain))
    assert again is account
    assert inner.total.rebuilt
    assert account.total.moved


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_memory": "1 MB"}, "max_memory='1 MB' without a model: a plan is for a step"),
        ({"max_slowdown": 1.1}, "max_slowdown=1.1 without a model: a plan is for a step"),
        ({"where": "block.*"}, "where='block.*' without a model: it selects modules of one"),
        ({"to": "disk"}, "to='disk': use"),
    ],
)
def test_what_needs_a_model_says_so(options: dict[str, Any], said: str) -> None:
    """A limit needs steps, and a selector needs modules: the error names the call that has them."""
    with pytest.raises(OffloadError, match=re.escape(said)):
        kedge.offload(**options)


def test_a_second_pair_of_hooks_is_explained() -> None:
    """PyTorch's error for a pair that the program registers on a saved tensor has a note with the reason and the remedy."""

    def own() -> None:
        y = params()[0].exp()
        y.grad_fn._raw_saved_result.register_hooks(lambda t: t, lambda t: t)  # type: ignore[union-attr]

    class Own(nn.Module):
        def forward(self) -> None:
            own()

    layer = kedge.offload(Own())
    with pytest.raises(RuntimeError, match="already been set") as of_block, kedge.offload():
        own()
    with pytest.raises(RuntimeError, match="already been set") as of_layer, kedge.offload():
        layer()
    for caught in (of_block, of_layer):
        (note,) = caught.value.__notes__
        assert note.startswith("kedge.offload has hooks on every tensor")

    given: list[Tensor] = []
    with kedge.offload(to=kedge.Disk(rebuild=False), min_bytes=1) as account:
        y = (params()[0] * 2).sin()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: given.append(t) or t.clone(), lambda t: t
        ):
            y = y.exp()
        y.sum().backward()
    assert len(given) == 1
    assert account.total.moved["disk"].number == 1
