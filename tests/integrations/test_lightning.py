"""Watching what Lightning's Trainer trains."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="Lightning is not installed")

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kedge.integrations.lightning import LightningCallback
from kedge.store.recording import Recording
from kedge.testing import assert_unhooked
from tests import forked

pytestmark = pytest.mark.timing

BATCHES = 12


@pytest.fixture(autouse=True)
def quiet():
    """Leave out what Lightning warns about: it has too few workers, and torch has deprecated what it uses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


class Coder(LightningModule):
    """An autoencoder whose parts are called one by one: the module itself never is."""

    def __init__(self, *, fails_at=None):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.decoder = nn.Linear(8, 4)
        self.loss = nn.MSELoss()
        self.fails_at = fails_at

    def training_step(self, batch, number):
        if number == self.fails_at:
            raise RuntimeError("no more data")
        return self.loss(self.decoder(self.encoder(batch[0])), batch[0])

    def validation_step(self, batch, number):
        self.training_step(batch, -1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Called(Coder):
    """The same, with a forward that the training step goes through."""

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, number):
        return self.loss(self(batch[0]), batch[0])


class Logging(Called):
    """The same, which logs its loss in each step, and the mean of that of an evaluation."""

    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, number):
        self.log("val_loss", super().training_step(batch, number))


class Rivals(LightningModule):
    """Two networks with an optimizer each, stepped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch, number):
        first, second = self.optimizers()
        for optimizer, sign in ((first, -1), (second, 1)):
            optimizer.zero_grad()
            self.manual_backward(sign * self.judge(self.maker(batch[0])).mean())
            optimizer.step()

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.maker.parameters(), lr=0.1),
            torch.optim.SGD(self.judge.parameters(), lr=0.1),
        ]


def fit(model, folder, what=None, **options):
    """Train on the CPU for one epoch; return the callback."""
    callback = LightningCallback(what)
    quiet = dict.fromkeys(
        ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False
    )
    given = {"max_epochs": 1, "accelerator": "cpu", "default_root_dir": folder, **quiet, **options}
    data = DataLoader(TensorDataset(torch.randn(4 * BATCHES, 4)), batch_size=4)
    trainer = Trainer(callbacks=[callback], **given)
    validates = isinstance(model, Coder)
    trainer.fit(model, data, data if validates else None)
    return callback


@pytest.mark.parametrize("kind", [Coder, Called])
def test_modules_have_the_names_that_the_module_gives_them(watch, tmp_path, kind):
    """Sites are named as in the LightningModule, whether it is called itself or only its parts are."""
    callback = fit(kind(), tmp_path, watch(every=1))
    recording = Recording.open(callback.watched.recording)
    named = {
        "encoder:out",
        "encoder.0:out",
        "encoder.1:out.grad",
        "decoder:out",
        "decoder.weight:param.grad",
        "loss:out",
    }

    assert named <= {site.site for site in recording.sites}
    assert recording.steps.tolist() == list(range(BATCHES))
    assert (
        recording.rows("encoder.0:out").count.tolist() == [4 * 8] * BATCHES
    )  # and nothing of the validation


def test_what_a_module_logs_is_recorded(watch, tmp_path):
    """Each value once, in the step that it belongs to; the evaluation before the training is left out."""
    callback = fit(Logging(), tmp_path, watch(every=1), max_epochs=2)
    recording = Recording.open(callback.watched.recording)
    logged = recording.logged

    assert logged["train_loss"].steps.tolist() == list(range(2 * BATCHES))
    losses = recording.series("loss", "mean")
    assert logged["train_loss"].values.tolist() == pytest.approx(losses.tolist(), rel=1e-6)
    assert logged["val_loss"].steps.tolist() == [BATCHES - 1, 2 * BATCHES - 1]


def test_a_step_is_the_optimizers_step_under_accumulation(watch, tmp_path):
    """With accumulated gradients a step has as many calls as there are batches in it."""
    callback = fit(Coder(), tmp_path, watch(every=1), accumulate_grad_batches=3)
    recording = Recording.open(callback.watched.recording)

    assert recording.steps.tolist() == list(range(BATCHES // 3))
    assert recording.rows("decoder:out").calls.tolist() == [3] * (BATCHES // 3)
    gradient, norm = (
        recording.rows("decoder.weight:param.grad"),
        recording.rows("decoder:grad.norm"),
    )
    assert gradient.calls.tolist() == [1] * (BATCHES // 3)  # when all three have added to it
    both = gradient.sumsq + recording.rows("decoder.bias:param.grad").sumsq
    assert norm.sumsq.tolist() == pytest.approx(both.tolist(), rel=1e-5)


def test_values_of_mixed_precision_are_those_the_modules_make(watch, tmp_path):
    """Under bf16-mixed an output is bfloat16, and a parameter and its gradient float32."""
    callback = fit(Coder(), tmp_path, watch(every=1), precision="bf16-mixed")
    recording = Recording.open(callback.watched.recording)

    dtypes = [
        recording.site(site).dtype
        for site in ("decoder:out", "decoder.weight:param", "decoder.weight:param.grad")
    ]
    assert dtypes == ["bfloat16", "float32", "float32"]


def test_several_optimizers_are_watched(watch, tmp_path):
    """The first optimizer to step makes the steps; what comes after its last one is none, and is not measured."""
    callback = fit(Rivals(), tmp_path, watch(every=1))
    recording = Recording.open(callback.watched.recording)

    assert recording.steps.tolist() == list(range(BATCHES))
    for site in (
        "maker.weight:update",
        "judge.weight:update",
        "maker.weight:param.grad",
        "judge.weight:param.grad",
    ):
        assert recording.rows(site).step.tolist() == list(range(BATCHES))
        assert recording.rows(site).calls.tolist() == [1] * BATCHES


def test_the_recording_is_where_the_trainer_leaves_its_results(tmp_path, capsys):
    """Without a place of its own, it is in the trainer's folder, and a message names it."""
    callback = fit(Coder(), tmp_path / "results")

    assert callback.watched.recording.parent == tmp_path / "results"
    assert Recording.open(callback.watched.recording).end.exit == 0
    assert f"see more with: kedge report {callback.watched.recording}" in capsys.readouterr().err


def test_an_exception_ends_the_watching(watch, tmp_path):
    """The recording says what ended the training, and no hook is left."""
    model = Coder(fails_at=5)
    with pytest.raises(RuntimeError, match="no more data"):
        fit(model, tmp_path, watch())

    assert_unhooked(model)
    assert Recording.open(tmp_path / "run.kedge").end.error == "RuntimeError: no more data"


def test_a_second_fit_has_a_recording_of_its_own(watch, tmp_path):
    """What a callback has recorded is not replaced when it is used again."""
    watched = watch()
    for name in ("run.kedge", "run-2.kedge"):
        fit(Coder(), tmp_path, watched)
        assert watched.recording == tmp_path / name

    first, second = (Recording.open(tmp_path / name) for name in ("run.kedge", "run-2.kedge"))
    assert {0, 1, 10} <= set(first.steps.tolist()) & set(second.steps.tolist())
    assert first.end.steps == second.end.steps == BATCHES


RANKS = """
import sys

sys.path.insert(0, sys.argv[1])
from pathlib import Path

from tests.integrations.test_lightning import Coder, fit

if __name__ == "__main__":
    fit(Coder(), Path(), devices=2, strategy="ddp_spawn")
"""


@pytest.mark.full
def test_the_ranks_of_a_trainer_make_one_recording(tmp_path):
    """Processes that the trainer starts, and that its launcher gives no rank, record into one folder together."""
    (tmp_path / "train.py").write_text(RANKS)
    command = [sys.executable, "train.py", str(Path(__file__).parents[2])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = forked.run(command, cwd=tmp_path, env=environment, ahead="lightning")
    assert done.returncode == 0, done.stderr
    [folder] = tmp_path.glob("train.py.*.kedge")
    recording = Recording.open(folder)

    assert recording.manifest["world"] == 2
    assert recording.rows("encoder.0:out").count[0] == 2 * 4 * 8
    assert (recording.end.steps, recording.end.error) == (BATCHES // 2, None)
    assert done.stderr.count("see more with: kedge report") == 1
