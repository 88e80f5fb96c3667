"""Where a step ends: what is alive together is of one step, and what saves nothing is none."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kedge
from tests.offload.engines import Shelf, engaged

X = torch.linspace(-1, 1, 320).view(16, 20)
DESTINATIONS = [pytest.param(None, id="kept"), pytest.param(Shelf(), id="moved")]


class Net(nn.Module):
    """Saves some tensors of 1280 bytes that can only be moved."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh())
        self.head = nn.Linear(20, 20)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.fixture
def net():
    """A model, the same each time."""
    torch.manual_seed(0)
    return Net()


def plain(net):
    """Call it, and go back."""
    net(X).sum().backward()


def with_evaluation(net):
    """A look at the validation data after each step."""
    net(X).sum().backward()
    with torch.no_grad():
        net(X)
    with torch.inference_mode():
        net(X)


def evaluation_first(net):
    """Targets from the model itself, before each step."""
    with torch.no_grad():
        target = net(X)
    (net(X) - target).pow(2).sum().backward()


def frozen(net):
    """A forward that has gradients on, and nothing to save."""
    net(X).sum().backward()
    with torch.enable_grad():
        net.requires_grad_(requires_grad=False)
        net(X)
        net.requires_grad_(requires_grad=True)


def several(net):
    """Several forwards before one backward."""
    sum(net(X + k).sum() for k in range(4)).backward()


def probed(net):
    """A forward whose graph nobody wants, among several."""
    first = net(X).sum()
    net(X)
    (first + net(X + 1).sum()).backward()


def twice_back(net):
    """Two losses of one forward, the second of which is computed after the backward of the first."""
    out = net(X)
    out.pow(2).sum().backward(retain_graph=True)
    out.sin().exp().sum().backward()


def in_pieces(net):
    """The parts are called, and the model never is."""
    net.head(net.body(X)).sum().backward()


def saved_before(net):
    """Something is saved before the model is called."""
    net((X.clone().requires_grad_() * 1.0).tanh()).sum().backward()


def checkpointed(net):
    """The whole model is made again in backward."""
    checkpoint(net, X.clone().requires_grad_(), use_reentrant=False).tanh().sum().backward()


def reentrant(net):
    """The whole model is made again in backward, which goes back in it on its own."""
    checkpoint(net, X.clone().requires_grad_(), use_reentrant=True).tanh().sum().backward()


def differentiated_within(net):
    """A gradient is a part of the loss: double backward."""
    x = X.clone().requires_grad_()
    (force,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    force.pow(2).sum().backward()


@pytest.mark.parametrize("shelf", DESTINATIONS)
@pytest.mark.parametrize(
    "step",
    [
        plain, with_evaluation, evaluation_first, frozen, several, probed, twice_back, in_pieces, saved_before, checkpointed,
        reentrant, differentiated_within,
    ],
)  # fmt: skip
def test_each_step_is_one(net, step, shelf):
    """Whatever a training step does, the account has as many steps as there were, and they are alike."""
    with engaged(net, shelf) as engine:
        sizes = []
        for turn in range(5):
            step(net)
            assert engine.account.steps == turn
            sizes.append(engine.account.step.naive)
    assert sizes[0]
    assert len({*sizes}) == 1
    assert engine.account.total.naive == sum(sizes)


def test_each_micro_batch_with_its_backward_is_a_step(net):
    """Gradients that are added up over several backwards make no step of several."""
    with engaged(net, Shelf()) as engine:
        for _ in range(2):
            for k in range(3):
                (net(X + k).sum() / 3).backward()
    assert engine.account.steps == 5


@pytest.mark.parametrize("shelf", DESTINATIONS)
def test_parts_that_are_never_gone_back_through_hold_no_step_open(net, shelf):
    """What was read ends a step when the model is called, though something of it lives on."""
    with engaged(net, shelf) as engine:
        held = []
        for turn in range(6):
            out, beside = net(X), net.body(X).tanh()
            out.sum().backward()
            held = [*held[-1:], beside]
            assert engine.account.steps == turn


class Energy(nn.Module):
    """Its output is a gradient."""

    def __init__(self, *, retained):
        super().__init__()
        self.net, self.after, self.retained = Net(), nn.Linear(20, 20), retained

    def forward(self, x):
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            (force,) = torch.autograd.grad(self.net(x).tanh().sum(), x, create_graph=self.retained)
        return self.after(force).tanh()


@pytest.mark.parametrize("retained", [True, False])
def test_no_step_ends_within_a_call(retained):
    """A model that differentiates in its forward has one step for each call and backward."""
    model = Energy(retained=retained)
    with engaged(model, Shelf()) as engine:
        for turn in range(4):
            model(X).sum().backward()
            assert engine.account.steps == turn


def test_a_gan_has_one_step_for_its_two_losses(net):
    """The judge's backward, and the maker's through the judge that was called again, are of the step of what was made."""
    judge = nn.Sequential(nn.Linear(20, 20), nn.Tanh())
    with engaged(net, Shelf()) as engine:
        for turn in range(4):
            made = net(X)
            (judge(made.detach()) - judge(X)).sum().backward()
            judge(made).sum().backward()
            assert engine.account.steps == turn


@pytest.mark.parametrize("shelf", DESTINATIONS)
@pytest.mark.parametrize("held", [False, True], ids=["dropped", "until the next"])
def test_graphs_that_are_abandoned_end(net, shelf, held, monkeypatch):
    """An evaluation with gradients on, of which nothing is read, fills neither the account nor what is remembered."""
    monkeypatch.setattr("kedge.offload.engine.engine._REMEMBERED", 1 << 30)
    with engaged(net, shelf) as engine:
        for turn in range(40):
            out = net(X)
            if not held:
                del out
            assert engine.account.steps == (turn // 2 if held else turn)
            assert len(engine.account.seen) < 30
        net(X).sum().backward()
        out = None
        net(X).sum().backward()
        assert engine.account.steps == (21 if held else 41)


@pytest.mark.parametrize("outer", [None, Shelf()], ids=["kept", "moved"])
@pytest.mark.parametrize("foreign", [False, True])
def test_an_inner_block_that_keeps_all_sees_its_steps(net, outer, foreign):
    """What the inner one leaves where it is, and the outer one or nobody takes, ends the inner one's steps as well."""
    with engaged(net, outer), engaged(net) as engine:
        for turn in range(3):
            if foreign:
                with torch.autograd.graph.saved_tensors_hooks(
                    lambda value: value, lambda value: value
                ):
                    several(net)
            else:
                several(net)
            assert engine.account.steps == turn


def test_a_graph_of_an_earlier_step_ends_no_later_one(net):
    """Only what was saved in a step, when it is read, ends it."""
    with engaged(net, Shelf()) as engine:
        early = net(X).sum()
        early.backward(retain_graph=True)
        first = net(X).sum()
        assert engine.account.steps == 1
        early.backward()
        second = net(X).sum()
        assert engine.account.steps == 1
        (first + second).backward()
        net(X)
        assert engine.account.steps == 2


def test_nothing_is_left_of_what_is_held_for_a_step(net):
    """What tells of a step's end holds neither a graph nor memory, and goes without the collector."""
    gc.disable()
    try:
        with engaged(net, Shelf()) as engine:
            several(net)
            assert engine._steps.step.gone
            out = net(X)
            assert not engine._steps.step.gone
            del out
            assert engine._steps.step.gone
    finally:
        gc.enable()


def test_threads_that_call_one_model_have_their_gradients(net):
    """Steps may be torn apart where several threads train one model, and nothing else is."""
    x = X.clone()
    wanted = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    wrong = []

    def work():
        for _ in range(20):
            found = torch.autograd.grad(offloaded(x).sum(), list(net.parameters()))
            wrong.append(not all(map(torch.equal, wanted, found)))

    offloaded = kedge.offload(net, to=kedge.Disk(), min_bytes=0)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 80
    total = offloaded.account.total
    assert total.freed.number == total.sum("moved").number + total.sum("rebuilt").number


def alive(account):
    """Return the bytes that stay in memory because they were saved."""
    return account.step.sum("kept").bytes - account.step.resident


@pytest.mark.parametrize("forwards", [1, 3, 4])
def test_a_limit_of_memory_holds_for_all_that_is_alive(forwards):
    """A plan for a step of several forwards keeps as much as the limit in all of them together, and no more."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
    x = torch.randn(256, 64)
    limit = 300_000
    with kedge.offload(
        model, to=kedge.Disk(rebuild=False), max_memory=limit, min_bytes=0
    ) as account:
        for turn in range(5):
            loss = sum(F.softplus(model(x + k)).sum() for k in range(forwards))
            if turn > 1:
                assert 0 < alive(account) <= limit
            loss.backward()
            assert account.steps == turn
    assert account.plan.table.nbytes == forwards * 6 * x.nbytes


@pytest.mark.parametrize("limit", [{"max_memory": "1 GB"}, {"max_slowdown": 1.0}])
def test_a_look_at_the_validation_data_does_not_keep_a_plan_away(net, limit):
    """Where a forward without gradients follows each step, there is a plan from the third step on."""
    with kedge.offload(net, to=kedge.Disk(rebuild=False), min_bytes=0, **limit) as account:
        for turn in range(6):
            with_evaluation(net)
            assert bool(account.plan) is (turn >= 2)
    assert account.steps == 5
    assert account.step.kept["planned"].number
    assert not account.step.sum("moved").number
    assert account.total.moved["disk"].number == 2 * account.step.kept["planned"].number
