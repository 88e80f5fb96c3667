"""Acting on a device, the simulated one: the look waits for it once in each step, and sees every step."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import kedge
from kedge.errors import FindingRaised
from kedge.store.events import StepSkippedEvent
from kedge.store.recording import Recording
from tests.watch.watched import MEASURED, SKIPPED, fix_kinds


def made():
    """Return a model on the device, its optimizer, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.randn(4, 8).to("sim")


def step(model, optimizer, x, factor=1.0) -> None:
    """Train for one step, on a loss with a factor."""
    optimizer.zero_grad()
    (model(x).square().mean() * factor).backward()
    optimizer.step()


def test_each_step_waits_once(sim, tmp_path) -> None:
    """Without an order none does; that is tested elsewhere."""
    model, optimizer, x = made()
    with kedge.watch(tmp_path / "run.kedge", every=1, on={"NAN-BORN": "stop"}) as run:
        run.tell = None
        for _ in range(3):
            step(model, optimizer, x)
        sim.reset_counts()
        for _ in range(5):
            step(model, optimizer, x)
        syncs = sim.counts()["syncs"]
    assert sum(n for kind, n in syncs.items() if kind != "event") == 5


@pytest.mark.parametrize("bad", [0, 2, 70])
def test_the_step_that_would_spoil_the_parameters_raises(bad, sim, tmp_path) -> None:
    """Also in steps that are not measured, whose losses are else read later."""
    model, optimizer, x = made()
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "snapshot,raise"}) as run:
        run.tell = None
        for _ in range(bad):
            step(model, optimizer, x)
        before = {name: value.cpu() for name, value in model.state_dict().items()}
        with pytest.raises(FindingRaised) as raised:
            step(model, optimizer, x, float("inf"))
    assert raised.value.finding.step == bad
    saved = load_file(tmp_path / "run.kedge" / f"snapshot-{bad}" / "model.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(before[name], value.cpu())
        assert torch.equal(before[name], saved[name])


def test_a_loss_that_is_bad_while_its_gradients_are_not_is_seen(sim, tmp_path) -> None:
    """Its value is read with the gradients."""
    model, optimizer, x = made()
    constant = torch.tensor(float("nan")).to("sim")
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "skip"}) as run:
        run.tell = None
        for at in range(30):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if at == 20:
                loss = loss + constant
            loss.backward()
            before = model[0].weight.detach().cpu()
            optimizer.step()
            assert torch.equal(before, model[0].weight.detach().cpu()) == (at == 20)
    (event,) = Recording.open(tmp_path / "run.kedge").of(StepSkippedEvent)
    assert event.step == 20


def test_a_loss_that_led_to_no_step_does_not_count_for_a_later_one(
    sim, tmp_path, monkeypatch
) -> None:
    """Also where the next pass begins at several losses, which are not read in skipped steps."""
    fix_kinds(monkeypatch, MEASURED[0], *SKIPPED * 20)
    model, optimizer, x = made()
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "stop"}) as run:
        run.tell = None
        for at in range(30):
            optimizer.zero_grad()
            losses = [model(x).square().mean() for _ in range(2)]
            if at % 7 == 5:
                (losses[0] * float("nan")).backward()
                continue
            if at % 7 == 6:
                torch.autograd.backward(losses)
            else:
                losses[0].backward()
            optimizer.step()
    assert torch.isfinite(model[0].weight.cpu()).all()
