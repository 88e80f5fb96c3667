"""A plan where there is more than one graph, or less room than it takes to learn."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import kedge
from kedge.errors import DiskFull
from kedge.offload.engine.policy import Choice
from kedge.offload.stores.disk import DiskStore

X = torch.linspace(-1, 1, 256 * 64).view(256, 64)


def model_of():
    """A model that saves three tensors of 64 KiB in a forward, beside what is there anyhow."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())))


def grads_of(model):
    """Its gradients, which are then none."""
    grads = [param.grad for param in model.parameters()]
    model.zero_grad()
    return grads


@pytest.mark.parametrize("limit", [70_000, 140_000, 210_000])
def test_graphs_that_are_retained_count_for_a_limit(limit):
    """What stays because it was planned stays within the limit also where a graph of the step before lives on."""
    model = model_of()
    model(X).sum().backward()
    plain = grads_of(model)
    with kedge.offload(
        model, to=kedge.Disk(rebuild=False), max_memory=limit, min_bytes=0
    ) as account:
        loss, most = None, 0
        for _ in range(12):
            loss = model(X).sum()  # the one before goes only now
            most = max(most, account.staying)
            loss.backward(retain_graph=True)
            assert all(map(torch.equal, plain, grads_of(model)))
        assert 0 < most <= limit
        assert account.plan.feasible
        del loss
        gc.collect()
        assert account.staying == 0


def test_what_a_plan_keeps_is_not_kept_away_by_graphs_that_are_gone():
    """An output that nobody goes back from, held until the next one is there, does not undo a plan."""
    model, head = model_of(), nn.Linear(64, 64)
    whole = nn.Sequential(model, head)
    with kedge.offload(
        whole, to=kedge.Disk(rebuild=False), max_memory=140_000, min_bytes=0
    ) as account:
        for turn in range(8):
            out = whole(X)
            beside = out[:1].tanh()
            out.sum().backward()
            if turn > 2:
                assert (
                    account.step.kept["planned"].number == account.plan.bytes_of(Choice.KEEP)[0] > 0
                )
        assert beside.requires_grad


@pytest.mark.parametrize("most", [1 << 22, 1 << 18])
def test_a_store_without_room_to_measure_it_does_not_end_the_program(monkeypatch, most):
    """How fast a store is is learned with as much as it takes; as long as that is nothing, all is done that can be."""
    put = DiskStore.put

    def little(store, data):
        if data.nbytes > most:
            raise DiskFull("no room")
        return put(store, data)

    monkeypatch.setattr(DiskStore, "put", little)
    model = model_of()
    with kedge.offload(
        model, to=kedge.Disk(rebuild=False), max_memory=140_000, min_bytes=0
    ) as account:
        for _ in range(5):
            model(X).sum().backward()
    assert bool(account.plan) is (most >= 1 << 20)
    assert not account.step.failed.number
    assert account.step.moved["disk"].number
