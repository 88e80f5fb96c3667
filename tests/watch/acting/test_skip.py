"""Steps that are skipped: they leave no trace in parameters, gradients and optimizers."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import kedge
from kedge.store.events import StepSkippedEvent
from kedge.store.recording import Recording
from tests.watch.acting.programs import Training, sgd

BAD = (3, 17, 18, 25)
STEPS = 30


def adam(**options):
    """Return a maker of Adam."""
    return lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1, **options)


OPTIMIZERS = {
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.01),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": adam(),
    "Adam amsgrad": adam(amsgrad=True),
    "Adam foreach": adam(foreach=True),
    "Adam fused": adam(fused=True),
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "LBFGS": None,
    "Muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": sgd,
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "SparseAdam": None,
}
"""Every optimizer of PyTorch; None for those that have a test of their own."""


def test_every_optimizer_of_pytorch_is_here() -> None:
    """A new one has to be tried."""
    named = {name.split()[0] for name in OPTIMIZERS}
    there = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert there - {"Optimizer"} <= named


@pytest.mark.parametrize("name", [name for name, make in OPTIMIZERS.items() if make])
@pytest.mark.parametrize("of_loss", [False, True], ids=["gradients", "loss"])
def test_a_skipped_step_is_as_one_that_is_left_out_by_hand(name, of_loss, tmp_path) -> None:
    """Every bit of the parameters, their gradients, and the optimizer's state is the same."""
    by_hand = Training(OPTIMIZERS[name], BAD, of_loss=of_loss)
    for _ in range(STEPS):
        by_hand.step_or_skip()

    training = Training(OPTIMIZERS[name], BAD, of_loss=of_loss)
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "skip"}) as run:
        run.tell = None
        for _ in range(STEPS):
            training.step()

    assert training.state() == by_hand.state()
    events = Recording.open(tmp_path / "run.kedge").of(StepSkippedEvent)
    assert [(event.step, event.code) for event in events] == [(step, "NAN-BORN") for step in BAD]


@pytest.mark.parametrize("make", [sgd, adam()])
def test_a_step_with_a_closure_is_skipped_too(make, tmp_path) -> None:
    """Its gradients are looked at when the closure has made them, as Lightning's loop has it."""
    by_hand = Training(make, BAD)
    for _ in range(STEPS):
        by_hand.step_or_skip()

    training = Training(make, BAD)
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "skip"}) as run:
        run.tell = None
        for _ in range(STEPS):
            training.step_with_closure()

    assert training.state() == by_hand.state()
    events = Recording.open(tmp_path / "run.kedge").of(StepSkippedEvent)
    assert [event.step for event in events] == list(BAD)


def test_a_step_of_lbfgs_that_begins_badly_leaves_the_parameters(tmp_path, capsys) -> None:
    """Only its count of evaluations goes on; later evaluations of a step are its own matter."""

    def lbfgs(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=0.1, max_iter=4)

    training = Training(lbfgs, bad=(2,))
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "skip"}):
        for step in range(5):
            before = [param.detach().clone() for param in training.model.parameters()]
            training.step_with_closure()
            same = all(map(torch.equal, before, training.model.parameters()))
            assert same == (step == 2)
    assert "skipped 1 optimizer step in all, for NAN-BORN" in capsys.readouterr().err


def test_sparse_gradients_are_looked_at(tmp_path) -> None:
    """Those of an embedding, whose optimizer is skipped alike."""
    torch.manual_seed(0)
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(list(table.parameters()))
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "skip"}) as run:
        run.tell = None
        for step in range(8):
            optimizer.zero_grad()
            values = table(torch.tensor([1, 1, step]))
            loss = values.square().sum()
            if step == 6:
                loss = loss + (values.sum() * 0).sqrt()
            loss.backward()
            before = table.weight.detach().clone()
            optimizer.step()
            assert torch.equal(before, table.weight) == (step == 6)


def test_of_two_optimizers_only_the_bad_one_is_skipped(tmp_path) -> None:
    """As of a network and its adversary, each with a loss of its own."""
    torch.manual_seed(0)
    nets = [nn.Linear(3, 1) for _ in range(2)]
    optimizers = [torch.optim.Adam(net.parameters()) for net in nets]
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "skip"}) as run:
        run.tell = None
        for step in range(20):
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                loss = net(torch.randn(5, 3)).square().mean()
                is_bad = step == 12 and net is nets[0]
                if is_bad:
                    loss = loss * float("nan")
                loss.backward()
                before = net.weight.detach().clone()
                optimizer.step()
                assert torch.equal(before, net.weight) == is_bad
    (event,) = Recording.open(tmp_path / "run.kedge").of(StepSkippedEvent)
    assert (event.step, event.optimizer) == (12, 0)


def test_schedulers_and_averages_see_an_ordinary_step(tmp_path) -> None:
    """PyTorch warns of a scheduler that steps without its optimizer; here there is nothing to warn of."""
    training = Training(sgd, bad=(0, 2))
    schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "skip"}) as run:
            run.tell = None
            for _ in range(4):
                training.step()
                schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.001])


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips_are_left_to_it(fused, tmp_path) -> None:
    """Also where the optimizer itself deals with them; the scaler adapts its scale as without Kedge."""

    def train(watched: bool) -> list[bytes]:
        training = Training(adam(fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=5)
        for _ in range(20):
            training.optimizer.zero_grad()
            scaler.scale(training.loss()).backward()
            scaler.step(training.optimizer)
            scaler.update()
        return [*training.state(), repr(scaler.state_dict()).encode()]

    plain = train(watched=False)
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "stop"}) as run:
        run.tell = None
        assert train(watched=True) == plain


def test_a_step_that_fails_without_gradients_does_not_spoil_the_next_one(tmp_path) -> None:
    """An optimizer of one's own may not expect parameters without gradients."""

    class Careless(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.data -= 0.1 * param.grad.data

    training = Training(lambda params: Careless(params, lr=0.1), bad=(1,))
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "skip"}) as run:
        run.tell = None
        training.step()
        with pytest.raises(AttributeError):
            training.step()
        training.optimizer.zero_grad()
        training.at = 2
        before = training.model[0].weight.detach().clone()
        training.step()
        assert not torch.equal(before, training.model[0].weight)
        assert torch.isfinite(training.model[0].weight).all()


def test_every_optimizer_that_steps_after_a_bad_loss_is_skipped(tmp_path: Path) -> None:
    """The loss is infinite, and its gradients are finite: neither of two optimizers is to train on it."""
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (one, other)]
    kept = []
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "skip"}):
        for step in range(4):
            kept = [each.weight.detach().clone() for each in (one, other)]
            loss = other(one(torch.ones(3, 2))).mean() + (torch.inf if step == 3 else 0.0)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()

    assert [torch.equal(a.weight, b) for a, b in zip((one, other), kept, strict=True)] == [
        True,
        True,
    ]
