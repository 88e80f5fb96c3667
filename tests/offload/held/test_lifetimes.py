"""An entry lives as long as somebody can ask for it, and not a moment longer."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kedge
from kedge.hooks.placing.stand_in import around_of
from kedge.hooks.saved.pairs import drain, pair_stack
from kedge.offload.held.entry import RecentlyRestored
from kedge.offload.rebuild import find
from tests import forked
from tests.offload.engines import Save, Shelf, engaged


def model_of():
    """Make the model."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)
    )


X = torch.linspace(-1, 1, 160).view(8, 20)


def grads_of(model, run):
    """Return the gradients that a run leaves."""
    model.zero_grad()
    run(model)
    return [param.grad.clone() for param in model.parameters()]


def retained(model):
    """Run backward three times."""
    loss = model(X).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(model):
    """Run backward for two losses."""
    y = model(X)
    y.pow(2).sum().backward(retain_graph=True)
    y.exp().sum().backward()


def several_forwards(model):
    """Run several forwards before their backwards."""
    losses = [model(X * i).pow(2).sum() for i in range(4)]
    for loss in (losses[2], losses[0], losses[3], losses[1]):
        loss.backward()


def some_abandoned(model):
    """Leave some graphs without a backward."""
    kept = model(X).sum()
    for _ in range(3):
        model(X * 2).sum()
    kept.backward()


def doubly(model):
    """Differentiate a gradient."""
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    g.pow(2).sum().backward()


def only_some(model):
    """Ask for one gradient only."""
    y = model[2](model[1](model[0](X)))
    torch.autograd.grad(y.sum(), model[2].weight)
    model(X).sum().backward()


@pytest.mark.parametrize(
    "run", [retained, two_losses, several_forwards, some_abandoned, doubly, only_some]
)
@pytest.mark.parametrize("rebuild", [False, True])
def test_gradients_are_those_of_a_plain_run(run, rebuild):
    """Whatever is asked for twice, late, out of order or never, gradients are equal, and every slot is freed once."""
    model, shelf = model_of(), Shelf()
    plain = grads_of(model, run)
    policy = {"find": find} if rebuild else {}
    with engaged(model, shelf, **policy):
        offloaded = grads_of(model, run)

    assert all(map(torch.equal, plain, offloaded))
    assert shelf.slots
    assert {slot.freed for slot in shelf.slots} == {1}


def test_a_second_access_is_as_good_as_the_first():
    """What a node saved can be asked for again and again; asking frees nothing."""
    shelf = Shelf()
    x = torch.linspace(0, 1, 50, requires_grad=True)
    with engaged(shelf=shelf):
        y = (x * 1).sin()
        first, second = y.grad_fn._saved_self, y.grad_fn._saved_self
        assert torch.equal(first, second)
        assert torch.equal(first, x)
        y.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_what_was_read_outlives_its_node():
    """A tensor that was unpacked stays what it is when its slot has been freed and used again."""
    shelf = Shelf()
    with engaged(shelf=shelf):
        y = (torch.full((50,), 3.0, requires_grad=True) * 1).sin()
        value = y.grad_fn._saved_self
        del y
        others = [(torch.full((50,), float(i), requires_grad=True) * 1).sin() for i in range(5)]
    assert shelf.freed == 1
    assert torch.equal(value, torch.full((50,), 3.0))
    assert others


def test_an_abandoned_graph_is_freed_at_once():
    """A graph that is never run backward goes with its last tensor, without the collector: no cycle was made."""
    shelf = Shelf()
    gc.disable()
    try:
        for store in (shelf, None):
            with engaged(shelf=store, find=find):
                x = torch.ones(100, requires_grad=True)
                made = [(x * 2).exp()]
                made.append(torch.relu(made[0]))
                made.append(F.gelu(made[1] + 1))
                made.append(made[2] * made[2])
                gone = [weakref.ref(each.untyped_storage()) for each in made]
                made.clear()
                assert [ref() for ref in gone] == [None] * 4
        assert shelf.freed == len(shelf.slots) > 0
    finally:
        gc.enable()


def test_a_moved_storage_is_freed_while_the_graph_lives():
    """What was moved leaves memory when the program lets go of it, and not when backward does."""
    shelf = Shelf()
    with engaged(shelf=shelf):
        a = torch.ones(1000, requires_grad=True) * 2
        storage = weakref.ref(a.untyped_storage())
        y = a.sin().sum()
        del a
        assert storage() is None
        y.backward()


def test_a_graph_outlives_its_block():
    """Backward after the block, and after the offload is gone, gives the same gradients."""
    model = model_of()
    plain = grads_of(model, lambda m: m(X).pow(2).sum().backward())

    def late(model):
        with kedge.offload(model, to=kedge.Disk(), min_bytes=64):
            loss = model(X).pow(2).sum()
        gc.collect()
        loss.backward()

    assert all(map(torch.equal, plain, grads_of(model, late)))


def test_a_slot_lives_as_long_as_the_last_of_its_handles():
    """Two nodes that saved one storage share its slot; the first one's end does not free it."""
    shelf = Shelf()
    x = torch.ones(100, requires_grad=True)
    with engaged(shelf=shelf):
        a = x.clone()
        first, second = a.sin(), a.cos()
        assert len(shelf.slots) == 1
        first.sum().backward()
        assert shelf.freed == 0
        second.sum().backward()
        assert shelf.freed == 1


def test_two_nodes_in_a_row_read_once():
    """What several nodes saved is brought back once for those that run one after the other."""
    shelf = Shelf()
    x = torch.ones(100, requires_grad=True)
    with engaged(shelf=shelf) as engine:
        a = (x * 1).relu()
        a.mul(a.detach()).sum().backward()

    assert shelf.gets == len(shelf.slots) == 1
    assert engine.account.total.restored.repeated.number == 0


def test_what_is_held_for_a_moment_is_bounded():
    """Bytes brought back are held for nodes to come only up to a bound; beyond it they are brought back again."""
    shelf = Shelf()
    x = torch.ones(100, requires_grad=True)
    with engaged(shelf=shelf) as engine:
        engine._known.entries.window = RecentlyRestored(1000)
        kept = [x * i for i in range(1, 6)]
        nodes = [Save.apply(x, value) for value in kept]
        for _ in range(2):
            for node in nodes:
                node.grad_fn.saved_tensors
        assert shelf.gets == 10
        assert engine.account.total.restored.repeated.number == 5
        nodes[-1].grad_fn.saved_tensors
        assert shelf.gets == 10


def test_models_train_in_threads_under_their_own_offloads():
    """Two threads that train two models under two offloads each get their own gradients."""
    models = [model_of(), model_of()]
    plain = [
        grads_of(model, lambda m, i=i: m(X * (i + 1)).pow(2).sum().backward())
        for i, model in enumerate(models)
    ]
    found, accounts = [None, None], [None, None]
    together = threading.Barrier(2)

    def train(i):
        with kedge.offload(models[i], to=kedge.Disk(), min_bytes=64) as accounts[i]:
            together.wait()
            for _ in range(10):
                found[i] = grads_of(models[i], lambda m: m(X * (i + 1)).pow(2).sum().backward())

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, plain[0] + plain[1], found[0] + found[1]))
    assert accounts[0].total.packs == accounts[1].total.packs > 0


def test_forwards_in_threads_under_one_offload():
    """Threads that call the model of one block are offloaded there, too; backward runs where it likes."""
    model = model_of()
    plain = grads_of(model, lambda m: [m(X * i).pow(2).sum().backward() for i in range(4)])
    losses = [None] * 4

    def forward(i):
        losses[i] = model(X * i).pow(2).sum()

    def in_threads(model):
        threads = [threading.Thread(target=forward, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for loss in losses:
            loss.backward()

    with kedge.offload(model, to=kedge.Disk(), min_bytes=64) as account:
        offloaded = grads_of(model, in_threads)

    assert all(map(torch.equal, plain, offloaded))
    assert account.module("1").moved["disk"].number == 4


def test_the_interpreter_ends_in_peace():
    """Handles that are alive when the interpreter ends, in a module's globals or in a cycle, raise nothing."""
    code = """
import torch, kedge
model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.GELU(), torch.nn.Linear(40, 3))
held = []
for to in (kedge.Disk(), kedge.Rebuild()):
    block = kedge.offload(model, to=to, min_bytes=64)
    block.__enter__()
    held.append((block, model(torch.ones(8, 20))))
held.append(held)
"""
    done = forked.run([sys.executable, "-W", "error", "-c", code], check=True)

    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("shelf", [None, Shelf()], ids=["kept", "moved"])
def test_storages_are_not_remembered_for_ever(monkeypatch, shelf):
    """A program in which no step is seen to end - nothing is read, no model is called - does not fill memory."""
    monkeypatch.setattr("kedge.offload.engine.engine._REMEMBERED", 50)
    with engaged(shelf=shelf) as engine:
        for i in range(500):
            (torch.full((100,), float(i)) * torch.ones(100, requires_grad=True)).sum()

    assert engine.account.steps == 0
    assert sum(engine.account.total.sum(what).number for what in ("kept", "moved")) == 500
    assert len(engine.account.seen) <= 51
    assert len(engine._known.kept) <= 51


def test_blocks_inside_a_block_leave_nothing():
    """However many blocks were opened and ended inside another one, nothing of them is held and no pair of theirs is left."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    with kedge.offload(model, min_bytes=0):
        pairs = len(pair_stack.pairs)
        ended = []
        for _ in range(5):
            inner = kedge.offload(model, min_bytes=0)
            with inner:
                model(torch.randn(4, 8)).sum().backward()
            ended.append(weakref.ref(around_of(inner)._engine))
            del inner
        gc.collect()
        assert len(pair_stack.pairs) == pairs
        assert [each() for each in ended] == [None] * 5
    assert drain() == []
