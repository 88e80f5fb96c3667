"""Operations in activation checkpoints, of both kinds, around a module and inside its forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge

KINDS = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
PLACES = pytest.mark.parametrize(
    "inside", [False, True], ids=["whole module", "part of its forward"]
)


class Block(nn.Module):
    """Two linear layers with a sigmoid, a tanh and a product, which save what they need for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def part(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.a(x))
        return torch.tanh(y * self.b(y)) * y

    def forward(self, x: Tensor) -> Tensor:
        return self.part(torch.sigmoid(x)) + x


class Inside(Block):
    """The same, which checkpoints a part of its own forward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, torch.sigmoid(x), use_reentrant=self.reentrant) + x


class Net(nn.Module):
    """Two blocks, checkpointed or not."""

    def __init__(self, block: Callable[[], nn.Module], reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(), block()])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = (
                block(x)
                if self.reentrant is None
                else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        return F.relu(x).sum()


def nets(reentrant: bool, inside: bool) -> tuple[Net, Net]:
    """A plain net and one that checkpoints, of the same weights."""
    plain = Net(Block, None)
    other = Net(lambda: Inside(reentrant), None) if inside else Net(Block, reentrant)
    other.load_state_dict(plain.state_dict())
    return plain, other


def gradients(net: nn.Module, sites: str, *actions: Any) -> tuple[list[Tensor], Any]:
    """Gradients of the parameters and the input of one backward with actions at the sites."""
    torch.manual_seed(1)
    x = torch.randn(3, 4, requires_grad=True)
    with kedge.hook(net, sites, *actions) as acts:
        net(x).backward()
    return [x.grad, *(p.grad for p in net.parameters())], acts


@KINDS
@PLACES
def test_an_edit_is_applied_again_in_the_recompute(reentrant: bool, inside: bool) -> None:
    """Gradients under an edit of operations are those of the net that does not checkpoint, to the last bit."""
    plain, other = nets(reentrant, inside)
    sites = ("blocks.*/sigmoid#1:out, blocks.*/tanh:in, blocks.*/mul:out", "blocks.*/mul#1:out")
    for chosen, edit in itertools.product(
        sites, (lambda v: v * 0.5, lambda v: v * 0 + 0.25, torch.exp)
    ):
        expected, got = gradients(plain, chosen, edit)[0], gradients(other, chosen, edit)[0]
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        plain.zero_grad()
        other.zero_grad()


@KINDS
@PLACES
def test_a_gradient_is_edited_once(reentrant: bool, inside: bool) -> None:
    """A gradient's edit at an operation in a checkpoint acts once, as without one."""
    plain, other = nets(reentrant, inside)
    sites = "blocks.*/tanh:out.grad, blocks.*/mul#0:in.grad"
    expected, got = (
        gradients(plain, sites, kedge.scale(3))[0],
        gradients(other, sites, kedge.scale(3))[0],
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@KINDS
@PLACES
def test_observers_see_the_forward_once(reentrant: bool, inside: bool) -> None:
    """Values and gradients are recorded once, under the names and with the bits that they have without a checkpoint."""
    plain, other = nets(reentrant, inside)
    sites = "blocks.*/*:out, blocks.*/*:out.grad"
    expected, got = (
        gradients(plain, sites, kedge.record())[1],
        gradients(other, sites, kedge.record())[1],
    )
    for block in (0, 1):
        for op in ("sigmoid#0", "sigmoid#1", "mul#0", "tanh#0", "mul#1"):
            for kind in ("out", "out.grad"):
                mine, theirs = (a.records(f"blocks.{block}/{op}:{kind}") for a in (expected, got))
                assert len(mine) == len(theirs) == 1
                assert torch.equal(mine[0].value, theirs[0].value)


@KINDS
@PLACES
def test_recomputes_can_be_observed(reentrant: bool, inside: bool) -> None:
    """What asks for recomputes sees operations of the checkpoint twice, under one name and with the same bits, but where it stops early."""
    _, other = nets(reentrant, inside)
    _, acts = gradients(other, "blocks.0/mul:out", kedge.record(recomputes=True))
    for op in (
        ("mul#0", "mul#1") if reentrant else ("mul#0",)
    ):  # the other kind stops in the last operation that saves
        first, second = acts.records(f"blocks.0/{op}")
        assert (first.event.recompute, second.event.recompute) == (False, True)
        assert first.event.pass_ == second.event.pass_
        assert torch.equal(first.value, second.value)


def test_two_sessions_each_repeat_their_own_edits() -> None:
    """Edits of two sessions inside of one checkpoint are both applied again, each once."""
    plain, other = nets(reentrant=False, inside=True)
    results = []
    for net in (plain, other):
        torch.manual_seed(1)
        x = torch.randn(3, 4, requires_grad=True)
        with (
            kedge.hook(net, "blocks.*/tanh:out", torch.exp),
            kedge.hook(net, "blocks.*/*:out", kedge.scale(0.5)),
        ):
            net(x).backward()
        results.append([x.grad, *(p.grad for p in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
