"""benchmarks/abroad.py: what the findings of a run count as, and a program that is run and judged."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from kedge.rules import ALL

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

PROGRAM = """
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(12):
    loss = model(torch.randn(8, 4)).square().mean()
    if step == 10:
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
TABLE = """
[[run]]
program = "here/train.py"
fault = "a loss that is multiplied by NaN"
codes = ["NAN-BORN"]
says = ["NaN", "step 10"]

[[run]]
program = "here/gone.py"
"""


@pytest.fixture
def abroad(monkeypatch):
    """The benchmark as a module."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    yield importlib.import_module("abroad")
    for name in ("abroad", "trials"):
        del sys.modules[name]


def finding(code: str, severity: str = "warning", message: str = "") -> dict[str, Any]:
    """Describe a finding."""
    return {"code": code, "severity": severity, "site": "fc:out", "message": message, "remedy": ""}


def test_a_fault_is_named_by_what_is_said_of_it(abroad):
    """The code alone is a true symptom; a false sentence outweighs everything."""
    case = abroad.Case(
        "a.py",
        fault="a",
        codes=("NAN-BORN",),
        says=("softmax",),
        partly=("SPIKE",),
        never=("clip",),
    )

    assert case.verdict([finding("NAN-BORN", message="softmax made it")]) == "named"
    assert case.verdict([finding("NAN-BORN", message="div made it")]) == "partly"
    assert case.verdict([finding("SPIKE")]) == "partly"
    assert case.verdict([finding("EVAL-MODE")]) == "missed"
    said = [finding("NAN-BORN", message="softmax made it"), finding("SPIKE", message="clip it")]
    assert case.verdict(said) == "FALSE"


def test_a_warning_on_a_sound_program_is_an_alarm(abroad):
    """An info is none."""
    case = abroad.Case("a.py")

    assert case.verdict([finding("SAME-BATCH", "info")]) == "quiet"
    assert case.verdict([finding("SAME-BATCH")]) == "ALARM"


def test_every_row_of_the_table_can_be_judged(abroad):
    """Its codes are those of rules, and what has a fault is named by one unless one run cannot show it."""
    known = {rule.code for rule in ALL}

    for case in abroad.cases(abroad.TABLE, ""):
        assert {*case.codes, *case.partly} <= known, case.title
        assert bool(case.fault) == bool(case.codes or case.only_diff), case.title


def test_a_program_is_run_and_judged(abroad, tmp_path, monkeypatch, capsys):
    """As a user would run it; one that is not there is counted."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "train.py").write_text(PROGRAM)
    table = tmp_path / "table.toml"
    table.write_text(TABLE)
    monkeypatch.setattr(sys, "argv", ["abroad.py", str(tmp_path), "--table", str(table)])

    assert abroad.main() == 0

    printed = capsys.readouterr().out
    assert "named   here/train" in printed
    assert "1 absent" in printed
    assert "named 1.00 of 1" in printed
