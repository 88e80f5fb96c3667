"""Snapshots: they hold every bit that a program needs to be there again."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import kedge
from kedge.rules.registry import check
from kedge.store.events import SnapshotEvent
from kedge.store.recording import Recording
from tests.watch.acting.programs import Training, bits, leaves, sgd


def loaded_optimizer(folder, optimizer) -> None:
    """Load an optimizer as the guide shows it."""
    tensors = load_file(folder / "optimizer.safetensors")
    saved = json.loads(
        (folder / "optimizer.json").read_text(),
        object_hook=lambda entry: tensors[entry["tensor"]] if "tensor" in entry else entry,
    )
    optimizer.load_state_dict({**saved, "state": dict(saved["state"])})


def lbfgs(params):
    """Return an optimizer whose state has lists of tensors."""
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3)


def adam(params):
    """Return an optimizer with tensors beside numbers in its state, and groups of its own."""
    first, *rest = params
    groups = [{"params": [first], "lr": 0.5}, {"params": rest}]
    return torch.optim.Adam(groups, lr=0.01, amsgrad=True)


@pytest.mark.parametrize("make", [sgd, adam, lbfgs])
def test_a_snapshot_is_the_state_before_the_step(make, tmp_path) -> None:
    """Loaded into new objects it has every bit, and the finding names its folder."""
    training = Training(make, bad=(6,))
    step = training.step
    if make is lbfgs:
        step = training.step_with_closure
    for _ in range(2):
        step()
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "snapshot"}) as run:
        run.tell = None
        while training.at < 6:
            step()
        before = [bits(value) for value in leaves(training.optimizer.state_dict())]
        values = {name: value.clone() for name, value in training.model.state_dict().items()}
        draws = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]  # noqa: NPY002
        step()
        step()

    recording = Recording.open(tmp_path / "run.kedge")
    (event,) = recording.of(SnapshotEvent)
    assert (event.step, event.code, event.folder) == (4, "NAN-BORN", "snapshot-4")
    folder = tmp_path / "run.kedge" / event.folder
    again = Training(make)
    again.model.load_state_dict(load_file(folder / "model.safetensors"))
    assert all(torch.equal(values[n], v) for n, v in again.model.state_dict().items())
    loaded_optimizer(folder, again.optimizer)
    assert [bits(value) for value in leaves(again.optimizer.state_dict())] == before
    about = json.loads((folder / "snapshot.json").read_text())
    assert (about["step"], about["models"], about["optimizers"]) == (4, ["model"], ["optimizer"])
    assert torch.equal(load_file(folder / "random.safetensors")["cpu"], draws[0])
    version, numbers, gauss = about["random"]["python"]
    assert (version, tuple(numbers), gauss) == draws[1]
    assert about["random"]["numpy"][1] == draws[2].tolist()

    (found, *_) = check(recording)
    assert (found.snapshot, found.entry()["evidence"]["snapshot"]) == ("snapshot-4", "snapshot-4")
    assert found.message.endswith("The program's state is kept in snapshot-4.")


def test_buffers_and_tied_parameters_are_there_by_every_name(tmp_path) -> None:
    """As `state_dict` has them, without buffers that it leaves out."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.one = nn.Linear(4, 4, bias=False)
            self.other = nn.Linear(4, 4, bias=False)
            self.other.weight = self.one.weight
            self.register_buffer("passing", torch.zeros(3), persistent=False)

        def forward(self, x):
            return self.other(self.one(self.norm(x)))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "snapshot"}) as run:
        run.tell = None
        (model(torch.randn(5, 4)).sum() * float("nan")).backward()
        optimizer.step()
    saved = load_file(tmp_path / "run.kedge" / "snapshot-0" / "model.safetensors")
    assert set(saved) == set(model.state_dict())
    Tied().load_state_dict(saved)


def test_a_snapshot_that_cannot_be_written_is_reported(tmp_path, monkeypatch, capsys) -> None:
    """The program goes on, nothing half is left, and the other orders are carried out."""

    def fail(*_args, **_named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kedge.watch.kept.program_state.save_file", fail)
    training = Training(sgd, bad=(2,))
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "snapshot,skip"}) as run:
        run.tell = None
        for _ in range(4):
            training.step()
    assert all(torch.isfinite(param).all() for param in training.model.parameters())
    assert "a snapshot failed" in capsys.readouterr().err
    assert not list((tmp_path / "run.kedge").glob("*snapshot*"))


def test_each_rank_has_its_own(tmp_path) -> None:
    """Only rank 0 has the plain name."""
    training = Training(sgd, bad=(0,))
    with kedge.watch(tmp_path / "run.kedge", on={"NAN-BORN": "snapshot"}) as run:
        run.tell = None
        assert run._watch is not None
        acting = run._watch.acting
        assert acting is not None
        acting.rank = 1
        training.step()
    assert [path.name for path in (tmp_path / "run.kedge").glob("snapshot-*")] == ["snapshot-0-1"]
