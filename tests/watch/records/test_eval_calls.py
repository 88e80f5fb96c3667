"""The lines of a program that put a model into evaluation mode."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from kedge.rules.training.eval_mode import EvalMode
from kedge.watch.records.facts.eval_calls import eval_calls
from tests.watch.watched import watch

PROGRAM = """
import sys

def check(model):
    model.eval()
    return sys._getframe()

class Trainer:
    def stop(self, model):
        self.inner = model.train(mode=False).eval()
        model.train(False)

def others(frame, model):
    frame.eval("a + b")
    eval("1")
    model.train(True)
    model.train()

made = check(model)
"""


def frame_of(source: str, file: Path) -> FrameType:
    """Run a program in a file; return the frame that it has made."""
    file.write_text(source)
    program: dict[str, Any] = {"model": nn.Linear(1, 1)}
    exec(compile(source, str(file), "exec"), program)
    found: FrameType = program["made"]
    return found


def test_lines_are_those_of_the_source(tmp_path: Path) -> None:
    """With their functions; calls of others, and those that begin training, are none."""
    found = eval_calls(frame_of(PROGRAM, tmp_path / "train.py"))

    places = [(line.line, line.function, line.text) for line in found if line.line < 20]
    assert places == [
        (5, "check", "model.eval()"),
        (10, "stop", "self.inner = model.train(mode=False).eval()"),
        (11, "stop", "model.train(False)"),
    ]


def test_a_program_may_be_nested_as_deep_as_python_takes_it(tmp_path: Path) -> None:
    """A chain of many calls is: what looks for the lines then does not end the record of the mode."""
    chain = "def built(query):\n    return query" + ".next()" * 900
    found = eval_calls(frame_of(f"{PROGRAM}\n{chain}\n", tmp_path / "long.py"))

    assert [line.line for line in found if line.file.endswith("long.py")] == [5, 10, 11]


def test_without_source_there_are_none(tmp_path: Path) -> None:
    """A program that was typed, or that is gone."""
    program: dict[str, Any] = {"sys": sys}
    exec("made = sys._getframe()", program)
    assert eval_calls(None) == ()
    assert [line for line in eval_calls(program["made"]) if line.file == "<string>"] == []


def test_the_finding_names_the_line() -> None:
    """It need not be the one that ran."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net.eval()

    def train() -> None:
        for _ in range(6):
            optimizer.zero_grad()
            net(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()

    (found,) = EvalMode().check(watch(train, every=1).recording())
    assert "of eval() at " in found.message
    assert "test_eval_calls.py:" in found.message
