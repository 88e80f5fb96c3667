"""``kedge replay``: a kept step runs again, as it was and with something different."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.repro.kept.plain_values import unpacked
from kedge.store.events import KeptStepEvent
from kedge.store.recording import Recording
from tests.marks import full

Kedge = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[..., str]
Replay = Callable[..., dict[str, Any]]

HEAD = """
    import sys

    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 16)
            self.norm = nn.BatchNorm1d(16)
            self.drop = nn.Dropout(0.3)
            self.last = nn.Linear(16, 3)

        def forward(self, x):
            return self.last(self.drop(self.norm(self.first(x)).relu()))
"""
PLAIN = (
    HEAD
    + """
    x, y = torch.randn(64, 6), torch.randint(0, 3, (64,))
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(12):
        rows = torch.randperm(64)[:16]
        batch, labels = x[rows], y[rows]
        batch = batch + 0.1 * torch.randn(16, 6)
        loss = F.cross_entropy(model(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        # between
        optimizer.step()
"""
)
ADVERSARIES = (
    HEAD
    + """
    maker, judge = nn.Linear(2, 6), nn.Linear(6, 1)
    makers = torch.optim.SGD(maker.parameters(), lr=0.1)
    judges = torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9)

    def judged(values, label):
        return F.binary_cross_entropy_with_logits(judge(values), torch.full((8, 1), label))

    def train_judge(real):
        judges.zero_grad()
        loss = judged(real, 1.0) + judged(maker(torch.randn(8, 2)).detach(), 0.0)
        loss.backward()
        judges.step()

    def train_maker():
        makers.zero_grad()
        loss = judged(maker(torch.randn(8, 2)), 1.0)
        loss.backward()
        makers.step()

    for step in range(8):
        train_judge(torch.randn(8, 6))
        train_maker()
"""
)
ACCUMULATING = (
    HEAD
    + """
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(5):
        for part in range(3):
            loss = F.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 3, (8,))) / 3
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
"""
)
TENSORS = (
    HEAD
    + """
    weight = torch.randn(5, 1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.05)
    for step in range(9):
        x = torch.randn(16, 5)
        optimizer.zero_grad()
        loss = (x @ weight - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
"""
)
FUNCTIONAL = (
    HEAD
    + """
    model = Net()
    given = {k: v.detach().clone().requires_grad_() for k, v in model.named_parameters()}
    optimizer = torch.optim.Adam(given.values(), lr=0.01)
    for step in range(8):
        x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
        loss = F.cross_entropy(torch.func.functional_call(model, given, (x,)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
)
CLOSURE = (
    HEAD
    + """
    model = nn.Linear(6, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    x = torch.randn(16, 6)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    for step in range(4):
        optimizer.step(closure)
"""
)
SPARSE = (
    HEAD
    + """
    table = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for step in range(4):
        for part in range(2):
            loss = table(torch.randint(0, 20, (16,))).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)
CARRIED = (
    HEAD
    + """
    model = nn.LSTM(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = None
    for step in range(5):
        out, state = model(torch.randn(5, 2, 4), state)
        state = tuple(each.detach() for each in state)
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
)
TRAINER = (
    HEAD
    + """
    class Trainer:
        def __init__(self):
            self.model = Net()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

        def loss_of(self, batch):
            return F.cross_entropy(self.model(batch["x"]), batch["y"])

        def step(self, batch, scale=1.0):
            self.optimizer.zero_grad()
            loss = scale * self.loss_of(batch)
            loss.backward()
            self.optimizer.step()

    trainer = Trainer()
    for step in range(8):
        trainer.step({"x": torch.randn(8, 6), "y": torch.randint(0, 3, (8,))}, scale=1 + step)
"""
)


@pytest.fixture
def replay(kedge: Kedge, script: Script) -> Replay:
    """Record a program, and run a kept step of it again; returns the JSON."""

    def run(source: str, *options: str, keep: int = 2, status: int = 0) -> dict[str, Any]:
        recorded = kedge(
            "run", "-q", "--force", "-o", "run", "--keep-steps", str(keep), script(source)
        )
        assert recorded.returncode == 0, recorded.stderr
        done = kedge("replay", "run", "--json", *options)
        assert done.returncode == status, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


@pytest.mark.parametrize(
    ("source", "step"),
    [(PLAIN, 10), (ADVERSARIES, 6), (ACCUMULATING, 3), (TRAINER, 6)],
    ids=["plain", "adversaries", "accumulating", "trainer"],
)
def test_a_step_runs_again_to_the_bit(replay: Replay, source: str, step: int) -> None:
    """Its loss, and the parameters that it leads to."""
    found = replay(source, "--step", str(step))

    assert found["same"]
    assert found["leads_on"]
    assert found["recorded"] == found["again"]["loss"]
    assert found["again"]["gradient"] > 0
    assert found["lacking"] == []
    assert found["other"] is None


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(
            (
                "        loss = F.cross_entropy(model(batch), labels)\n"
                "        optimizer.zero_grad()\n"
                "        loss.backward()\n",
                "        def loss(batch, labels):\n"
                "            value = F.cross_entropy(model(batch), labels)\n"
                "            optimizer.zero_grad()\n"
                "            value.backward()\n"
                "        loss(batch, labels)\n",
            ),
            id="a function that is called loss",
        ),
        pytest.param(
            (
                "        loss = F.cross_entropy(model(batch), labels)\n",
                '        batch = {"tensor": batch}\n'
                '        loss = F.cross_entropy(model(batch["tensor"]), labels)\n',
            ),
            id="a batch with the key tensor",
        ),
        pytest.param(
            ("model = Net()", 'model = Net(); model.spare = nn.Linear(2, 2, device="meta")'),
            id="a module on the meta device",
        ),
        pytest.param(
            (
                "        optimizer.zero_grad()\n        loss.backward()\n",
                "        optimizer.zero_grad(); other = model(batch).square().mean()\n"
                "        other.backward(); loss.backward()\n",
            ),
            id="two passes on one line",
        ),
    ],
)
def test_programs_as_people_write_them_run_again(replay: Replay, changed: tuple[str, str]) -> None:
    """Their loss, and the parameters that the step leads to."""
    assert changed[0] in PLAIN

    found = replay(PLAIN.replace(*changed), "--step", "10")

    assert found["same"]
    assert found["leads_on"]


def test_parameters_in_a_dict_run_again(replay: Replay) -> None:
    """As those of a functional call."""
    found = replay(FUNCTIONAL, "--step", "5")

    assert found["same"]
    assert found["recorded"] == found["again"]["loss"]


def test_an_optimizer_that_computes_the_loss_itself_does_not_step(replay: Replay) -> None:
    """Nor is anything said of the parameters after the step."""
    found = replay(CLOSURE, "--step", "2")

    assert found["same"]
    assert found["again"]["error"] is None
    assert found["again"]["loss_after"] is None
    assert found["leads_on"] is None


def test_sparse_gradients_before_a_pass_are_kept(replay: Replay) -> None:
    """As an embedding accumulates them."""
    found = replay(SPARSE, "--step", "2")

    assert found["same"]
    assert found["again"]["error"] is None


def test_a_variable_that_the_step_carries_on_is_named(replay: Replay) -> None:
    """At the backward pass it has its next value already."""
    found = replay(CARRIED, "--step", "3", status=1)

    assert not found["same"]
    assert found["lacking"] == ["the variable state"]


def test_a_pass_alone_is_chosen_in_the_default_step(replay: Replay) -> None:
    """Which is the last one here."""
    found = replay(ACCUMULATING, "--pass", "0")

    assert (found["step"], found["pass"]) == (4, 0)


def test_each_pass_of_a_step_runs_again(replay: Replay) -> None:
    """The gradients of the passes before it are there, and are part of the norm."""
    first, second = (replay(ACCUMULATING, "--step", "3", "--pass", n) for n in ("0", "1"))

    assert first["same"]
    assert second["same"]
    assert first["leads_on"] is second["leads_on"] is None  # no optimizer steps after them
    assert first["again"]["gradient"] != second["again"]["gradient"]


def test_tensors_that_are_trained_without_a_module_run_again(replay: Replay) -> None:
    """They are variables of the program and parameters of its optimizer."""
    found = replay(TENSORS)

    assert found["same"]
    assert found["again"]["gradient"] > 0
    assert found["again"]["loss_after"] < found["again"]["loss"]


def test_what_lies_between_backward_and_the_step_is_said_not_to_run_again(replay: Replay) -> None:
    """As clipping does; the next kept step shows that there was something."""
    clipped = "nn.utils.clip_grad_norm_(model.parameters(), 0.01)"
    found = replay(PLAIN.replace("# between", clipped), "--step", "10")

    assert found["same"]
    assert found["leads_on"] is False


def test_what_is_different_changes_the_step_alone(replay: Replay) -> None:
    """The step as it was comes first, and is the same with and without."""
    plain = replay(PLAIN)
    rate = replay(PLAIN, "--rate", "0")
    rows = replay(PLAIN, "--without-rows", "3,5")
    seed = replay(PLAIN, "--seed", "7")
    clip = replay(PLAIN, "--clip", "1e-9", "--rate", "0.01")

    for found in (rate, rows, seed, clip):
        assert found["again"] == plain["again"]
        assert found["other"]["error"] is None
    assert rate["other"]["loss"] == rate["other"]["loss_after"] == plain["again"]["loss"]
    assert rows["what_if"] == "without 2 rows (3, 5)"
    assert rows["other"]["loss"] != plain["again"]["loss"]
    assert seed["other"]["loss"] != plain["again"]["loss"]
    assert clip["other"]["gradient"] == plain["again"]["gradient"]


def test_a_step_is_computed_with_another_precision(replay: Replay) -> None:
    """In float64 the loss differs in its last digits, under autocast in its third."""
    double = replay(PLAIN, "--double")
    half = replay(PLAIN, "--autocast", "bf16")

    for found, least, most in ((double, 0, 1e-5), (half, 1e-5, 0.05)):
        apart = abs(found["other"]["loss"] / found["recorded"] - 1)
        assert least < apart < most


def test_a_bad_step_is_kept_without_being_asked_for(kedge: Kedge, script: Script) -> None:
    """It says which operation made the value, and the last line of the run how to run it again."""
    before = "optimizer.zero_grad()"
    bad = PLAIN.replace(before, f"if step == 7: loss = (loss - 9).log()\n        {before}")
    run = kedge("run", "-o", "run", script(bad))
    assert "[kedge] kept step 7" in run.stderr
    assert "kedge replay run" in run.stderr

    done = kedge("replay", "run", "--step", "7")

    assert done.returncode == 0, done.stderr
    assert "its loss is NaN again: other values may give a NaN, too" in done.stdout
    assert re.search(r"not finite: log in the\s+program \(train.py:30", done.stdout)


def test_a_step_with_infinite_gradients_leads_to_the_parameters_after_it(replay: Replay) -> None:
    """Its own gradients are not taken for some that were there before."""
    whole = "F.cross_entropy(model(batch), labels)"
    assert whole in PLAIN
    endless = "model(batch)[:1].square().mean() * (1.0 if step < 10 else float('inf'))"

    source = PLAIN.replace(whole, endless).replace("optim.Adam", "optim.SGD")

    found = replay(source, "--step", "10")

    assert found["same"]
    assert found["leads_on"]


def test_a_bad_step_stays_among_the_last_ones(kedge: Kedge, script: Script) -> None:
    """However many come after it."""
    before = "optimizer.zero_grad()"
    bad = PLAIN.replace(before, f"if step == 5: loss = loss * nan\n        {before}")
    run = kedge(
        "run", "-o", "run", "--keep-steps", "2", script(bad.replace("* nan", "* float('nan')"))
    )
    assert "[kedge] kept steps 5, 6, 10, 11" in run.stderr

    found = json.loads(kedge("replay", "run", "--json").stdout)

    assert found["step"] == 5
    assert found["same"]


def test_a_step_is_recorded_with_every_value(
    kedge: Kedge, script: Script, replay: Replay, tmp_path: Path
) -> None:
    """With the sites that are asked for."""
    replay(PLAIN, "-o", "again.kedge", "--sites", "first, last")

    recording = Recording.open(tmp_path / "again.kedge")
    assert {site.path for site in recording.sites if site.kind == "out"} == {"first", "last"}
    assert not recording.of(KeptStepEvent)


def test_a_changed_program_is_run_as_it_was_recorded(
    kedge: Kedge, script: Script, replay: Replay, tmp_path: Path
) -> None:
    """The recording has its source."""
    replay(PLAIN)
    script(PLAIN.replace("0.3", "0.5"))

    done = kedge("replay", "run")

    assert done.returncode == 0, done.stderr
    assert "train.py is another one than it was in the run" in done.stderr

    (tmp_path / "train.py").unlink()
    assert kedge("replay", "run").returncode == 0


def test_a_step_that_takes_what_cannot_be_kept_is_said_to_be_another(replay: Replay) -> None:
    """An object of the program's own holds what the loss depends on."""
    source = TRAINER.replace("scale * self", "self.scale() * self").replace(
        "def step(self",
        "count = 0\n\n        def scale(self):\n            self.count += 1\n"
        "            return self.count\n\n        def step(self",
    )
    source = source.replace("scale=1.0", "").replace(", scale=1 + step", "")

    found = replay(source, status=1)

    assert not found["same"]
    assert found["leads_on"] is None
    assert "the variable self" in found["lacking"]


def test_a_program_that_watches_itself_runs_again(
    kedge: Kedge, script: Script, tmp_path: Path
) -> None:
    """Its block would replace the recording from which the step is taken."""
    loop = PLAIN.partition("    for step in")
    inside = "".join(f"    {line}\n" for line in f"{loop[1]}{loop[2]}".splitlines())
    block = "    import kedge\n    with kedge.watch('run.kedge', force=True, keep_steps=2):\n"
    source = f"{loop[0]}{block}{inside}"
    name = script(source)
    done = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr

    for _ in range(2):
        found = kedge("replay", "run.kedge", "--json", "--step", "10")
        assert found.returncode == 0, found.stderr
        assert json.loads(found.stdout)["leads_on"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--step", "3"), "has not kept step 3; it has 10, 11"),
        (("--step", "10", "--pass", "4"), "run has not kept backward pass 4 of step 10; it has 0"),
        (("--without-rows", "a"), "'a' are no rows, such as 3,17"),
        full(("--rate", "nan"), "'nan' is no learning rate, such as 0.01"),
        full(("--clip", "0"), "'0' is no norm above zero"),
        full(("--seed", str(2**64)), f"'{2**64}' is no seed, from 0 to {2**64 - 1}"),
        (("-o", "run"), "cannot create the recording run: there is one already"),
    ],
)
def test_what_was_not_kept_is_said(
    kedge: Kedge, replay: Replay, options: tuple[str, ...], said: str
) -> None:
    """With what there is instead."""
    replay(PLAIN)

    done = kedge("replay", "run", *options)

    assert done.returncode == 2
    assert said in done.stderr


def test_rows_that_a_batch_does_not_have_are_an_error_of_that_run_alone(replay: Replay) -> None:
    """The step as it was is told all the same."""
    found = replay(PLAIN, "--without-rows", "16")

    assert found["same"]
    assert "the batch has 16 rows, from 0 to 15; there is no row 16" in found["other"]["error"]


def test_a_batch_without_all_its_rows_is_said(replay: Replay) -> None:
    """Instead of an error of the program's lines."""
    found = replay(PLAIN, "--without-rows", ",".join(map(str, range(16))))

    assert found["other"]["error"].endswith("none of the 16 rows of the batch would be left")


@pytest.mark.parametrize(
    "name", [full("pass.safetensors"), "model.safetensors", full("optimizer.json")]
)
def test_a_damaged_file_is_named(kedge: Kedge, replay: Replay, tmp_path: Path, name: str) -> None:
    """With its folder."""
    replay(PLAIN)
    (tmp_path / "run/step-11-0" / name).write_bytes(b"{")

    done = kedge("replay", "run")

    assert done.returncode == 2
    assert "step-11-0 has no step that can run again" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_is_missing_is_not_said_to_be_another_one(
    kedge: Kedge, replay: Replay, tmp_path: Path
) -> None:
    """The recorded one is run."""
    replay(PLAIN)
    (tmp_path / "train.py").unlink()

    done = kedge("replay", "run")

    assert done.returncode == 0, done.stderr
    assert "train.py is not there: the recorded one is run" in done.stderr


def test_a_kept_tensor_is_copied_out_of_its_file() -> None:
    """A step may change it in place, and rounds otherwise where memory is not aligned."""
    tensors = {"x": torch.ones(3)}

    value = unpacked({"tensor": "x"}, tensors)

    value.mul_(2)
    assert tensors["x"].tolist() == [1, 1, 1]


def test_a_recording_without_kept_steps_says_how_to_keep_them(kedge: Kedge, script: Script) -> None:
    """With ``--keep-steps 0`` not even a bad one is kept."""
    kedge("run", "-q", "-o", "run", "--keep-steps", "0", script(PLAIN.replace("/ 3", "* nan")))

    done = kedge("replay", "run")

    assert done.returncode == 2
    assert "kedge run --keep-steps 2" in done.stderr


def test_keeping_steps_changes_no_bit(kedge: Kedge, script: Script, tmp_path: Path) -> None:
    """Parameters and random numbers are those of a plain run."""
    end = "\n    print(torch.rand(1).item(), sum(p.double().sum() for p in model.parameters()).item())\n"
    plain = kedge("run", "-q", "--keep-steps", "0", "-o", "a", script(PLAIN + end))
    kept = kedge("run", "-q", "--keep-steps", "3", "-o", "b", script(PLAIN + end))

    assert plain.stdout == kept.stdout
    assert [folder.name for folder in sorted((tmp_path / "b").glob("step-*"))] == [
        "step-10-0",
        "step-11-0",
        "step-9-0",
    ]


def test_a_step_is_run_again_from_any_folder(kedge: Kedge, script: Script, tmp_path: Path) -> None:
    """The program runs where it ran, and finds its files; what is written is written here."""
    source = PLAIN.replace("x, y = torch", "assert open('data.txt').read()\n    x, y = torch", 1)
    (tmp_path / "data.txt").write_text("there")
    kedge("run", "-q", "-o", "run.kedge", "--keep-steps", "1", script(source))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    words = ("replay", "../run.kedge", "-o", "again.kedge")
    done = subprocess.run(
        [sys.executable, "-m", "kedge", *words],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "to the bit" in done.stdout
    assert Recording.open(elsewhere / "again.kedge").sites
