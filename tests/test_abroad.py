"""benchmarks/abroad.py: what the findings of a run count as, and a program that is run and judged."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kedge.compare.against.departs import page
from kedge.examination.result import NAMES
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
    for name in (
        "abroad",
        "abroad_cases",
        "ways",
        "against",
        "examine",
        "faults_in_the_wild",
        "trials",
    ):
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


def test_every_row_says_what_the_other_ways_have_to_say(abroad):
    """Trials and kinds that there are, of a twin that has no fault; or the reason why nothing can be shown."""
    every = abroad.cases(abroad.TABLE, "")
    sound = {case.title for case in every if not case.fault}
    named = re.findall(r"\(([\w, ]+)\)", " ".join(page().split()))
    kinds = {word for words in named for word in words.split(", ")}

    for case in every:
        trials = [each for key in ("wrong", "look", "beside") for each in case.examine.get(key, ())]
        departing = case.against.get("kinds", ())
        assert {*trials} <= {*NAMES}, case.title
        assert {*departing} <= kinds, case.title
        assert not case.twin or case.twin in sound, case.title
        assert bool(departing) <= bool(case.twin), case.title
        if case.fault and not case.program.startswith("words/"):
            shown = case.examine.get("wrong") or case.examine.get("look")
            assert bool(shown) != bool(case.examine.get("nothing")), case.title
            assert bool(departing) != bool(case.against.get("nothing")), case.title


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


RATE = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), 10.0 if sys.argv[1:] == ["fast"] else 0.1)
for step in range(30):
    x = torch.randn(16, 4)
    loss = torch.nn.functional.nll_loss(model(x).log_softmax(int("over" not in sys.argv)), x[:, :3].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
THREE_WAYS = """
[[run]]
program = "here/rate.py"
arguments = ["fast"]
fault = "a rate a hundred times too large"
codes = ["RATE-TOO-LARGE"]
twin = "here/rate.py right"
examine = {look = ["one-batch"]}
against = {kinds = ["rate"]}

[[run]]
program = "here/rate.py"
arguments = ["over"]
fault = "softmax over the batch"
codes = ["DOUBLE-SOFTMAX"]
twin = "here/rate.py right"
examine = {wrong = ["logits"], look = ["samples", "loss-at-start"]}
against = {nothing = "its sizes stay within those of the good run"}

[[run]]
program = "here/rate.py"
arguments = ["right"]
"""


@pytest.mark.full
def test_three_ways_are_asked(abroad, tmp_path, monkeypatch, capsys):
    """A run, an examination and a good run, whose recording is another program: another seed, and longer."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "rate.py").write_text(RATE)
    table = tmp_path / "table.toml"
    table.write_text(THREE_WAYS)
    kept = tmp_path / "kept"
    asked = ["--table", str(table), "--keep", str(kept), "--by", "run,examine,against"]
    monkeypatch.setattr(sys, "argv", ["abroad.py", str(tmp_path), *asked])

    assert abroad.main() == 0

    printed = capsys.readouterr().out
    fast, over, right = (part.split("\n\n")[0] for part in printed.split("here/rate ")[1:])
    assert re.search("against  named .*rate", fast)
    assert re.search("examine  named .*wrong:logits", over)
    assert re.search("run +quiet.*\n +examine +quiet.*\n +against +quiet", right)
    assert re.search("here: of 2 faults run ., examine ., against 1, any 2; 0 of 1", printed)
    good = next(kept.glob("*right-good")) / "rate.py"
    assert "manual_seed(100)" in good.read_text()
    assert "range(45)" in good.read_text()


def test_a_way_that_is_none_is_refused(abroad, monkeypatch, capsys):
    """The ways are named."""
    monkeypatch.setattr(sys, "argv", ["abroad.py", "here", "--by", "eye"])

    with pytest.raises(SystemExit):
        abroad.main()
    assert "the ways are run, examine, against" in capsys.readouterr().err
