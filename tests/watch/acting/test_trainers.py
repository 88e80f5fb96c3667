"""Loops of other libraries: what is stopped ends, and what is raised can be caught."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import kedge
from kedge.errors import FindingRaised, TrainingStopped
from kedge.store.events import StepSkippedEvent
from kedge.store.recording import Recording

pytest.importorskip("lightning", reason="Lightning is not installed")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer

pytestmark = pytest.mark.filterwarnings("ignore")

BAD = 3


class Net(LightningModule):
    """A small module, one of whose losses is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seen = 0
        self.ended_by = None

    def training_step(self, batch, index):
        """Return the loss."""
        self.seen += 1
        loss = self.layer(batch).square().mean()
        if index == BAD:
            loss = loss * float("nan")
        return loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def on_exception(self, error) -> None:
        """Note the error."""
        self.ended_by = error


def fit(net, folder) -> None:
    """Train for eight steps; Lightning gives each optimizer a closure."""
    torch.manual_seed(0)
    batches = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=2)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(net, batches)


@pytest.mark.parametrize(("action", "error"), [("stop", TrainingStopped), ("raise", FindingRaised)])
def test_lightning_ends_at_a_finding(action, error, tmp_path) -> None:
    """Before the step: the parameters are finite."""
    net = Net()
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": action}) as run:
        run.tell = None
        with pytest.raises(error) as raised:
            fit(net, tmp_path)
    assert (raised.value.finding.step, net.seen) == (BAD, BAD + 1)
    assert torch.isfinite(net.layer.weight).all()


def test_lightning_goes_on_after_a_skipped_step(tmp_path) -> None:
    """All other steps are taken."""
    net = Net()
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "skip"}) as run:
        run.tell = None
        fit(net, tmp_path)
    assert net.seen == 8
    assert torch.isfinite(net.layer.weight).all()
    (event,) = Recording.open(tmp_path / "run.kedge").of(StepSkippedEvent)
    assert event.step == BAD
