"""Values that the program logs: recorded with the step, read late from devices, and nothing outside of a watch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from kedge import logged
from kedge.rules.registry import check
from kedge.store.recording import Recording
from tests.watch.watched import Memory, Paced, at_levels, net, watch, watched


def train(log: Callable[[int], None], steps: int, *, before: bool = False) -> Callable[[], None]:
    """Return a program that trains, and logs between its backward and its optimizer's step or after that."""

    def program() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            if before:
                log(step)
            optimizer.step()
            if not before:
                log(step)

    return program


def seen(log: Memory) -> dict[str, list[tuple[int, float]]]:
    """Return the steps and values of each name."""
    series = log.recording().logged
    return {
        name: list(zip(each.steps.tolist(), each.values.tolist(), strict=True))
        for name, each in series.items()
    }


@pytest.mark.parametrize("before", [True, False])
@at_levels()
def test_a_value_belongs_to_its_step(levels: Any, paced: Paced, before: bool) -> None:
    """Whatever is measured in it, and whether the optimizer has stepped already."""
    paced(*levels)
    program = train(lambda step: kedge.log(number=step), 9, before=before)
    log = watched(lambda _: program())
    assert seen(log) == {"number": [(step, float(step)) for step in range(9)]}


def test_numbers_of_all_kinds_are_taken() -> None:
    """Python's, NumPy's and tensors, also those that are not finite, and names that are no names of Python."""

    def log(_: int) -> None:
        kedge.log(
            {"val/accuracy": torch.tensor([0.5])},
            whole=3,
            flag=True,
            tenth=Decimal("0.1"),
            numpy=np.float32(2.0),
            array=np.array(4.0),
            half=torch.tensor(1.5, dtype=torch.float16, requires_grad=True),
            integer=torch.tensor(7),
            nothing=float("nan"),
            most=-float("inf"),
        )

    recording = watch(train(log, 1), every=1).recording()
    values = {name: each.values.tolist() for name, each in recording.logged.items()}
    assert np.isnan(values.pop("nothing")).all()
    assert values == {
        "val/accuracy": [0.5], "whole": [3.0], "flag": [1.0], "tenth": [0.1], "numpy": [2.0],
        "array": [4.0], "half": [1.5], "integer": [7.0], "most": [-np.inf],
    }  # fmt: skip
    assert "NAN-BORN" not in {found.code for found in check(recording)}


def test_the_last_value_of_a_step_counts() -> None:
    """As that of an average that goes on through a step."""

    def log(step: int) -> None:
        kedge.log(mean=step)
        kedge.log(mean=step + 0.5)

    assert seen(watch(train(log, 3), every=1)) == {"mean": [(0, 0.5), (1, 1.5), (2, 2.5)]}


def test_what_is_logged_changes_no_statistics() -> None:
    """A tensor that is changed afterwards was what it was, and no graph is kept."""
    running = torch.zeros(())

    def log(step: int) -> None:
        running.add_(1)
        kedge.log(running=running)

    log_of = watch(train(log, 4), every=1)
    assert seen(log_of) == {"running": [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)]}
    silent = watch(train(lambda _: None, 4), every=1)
    assert log_of.texts() == silent.texts()
    assert log_of.watch.summary.steps == silent.watch.summary.steps


def test_nothing_is_kept_outside_of_a_watch(tmp_path: Path) -> None:
    """Also after one, and in a program that does not import torch."""
    watch(train(lambda _: None, 1))
    assert logged.receivers == []
    kedge.log(accuracy=0.5)
    code = 'import sys, kedge; kedge.log(accuracy=0.5); print("torch" in sys.modules)'
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "False\n"


def test_it_is_in_the_recording_of_a_block(tmp_path: Path) -> None:
    """Steps and values, as many as were logged, in chunks that are fewer."""
    block = kedge.watch(tmp_path / "run.kedge", budget=None)
    block.tell = None
    with block:
        train(lambda step: kedge.log(accuracy=step / 1000), 600)()
    recording = Recording.open(tmp_path / "run.kedge")
    series = recording.logged["accuracy"]
    assert series.steps.tolist() == list(range(600))
    assert series.values.tolist() == [step / 1000 for step in range(600)]
    lines = (tmp_path / "run.kedge" / "events.jsonl").read_text(encoding="utf-8")
    assert 1 <= lines.count('"logged"') <= 60


class Refused(nn.Module):
    """A module, which is no number."""


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(2), "log(x=a Tensor): a value is a number or a tensor of one element"),
        (np.ones(2), "a value is a number"),
        ("0.5", "a value is a number"),
        (None, "a value is a number"),
        (10**400, "a value is a number"),
        (torch.ones((), dtype=torch.complex64), "a value is a number"),
        (Refused(), "a value is a number"),
    ],
)
def test_what_is_no_number_is_an_error(value: Any, said: str) -> None:
    """With and without a watch, so that a program runs in both alike."""
    with pytest.raises(kedge.errors.WrongCall, match="kedge.log|number") as error:
        kedge.log(x=value)
    assert said in str(error.value)
