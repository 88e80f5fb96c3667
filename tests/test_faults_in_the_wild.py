"""The programs of benchmarks/faults_in_the_wild.py fit their faults, and the figures are those of the definitions."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def wild():
    """The benchmark as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        yield importlib.import_module("faults_in_the_wild")
        for name in ("faults_in_the_wild", "trials"):
            del sys.modules[name]


def outcome(wild, codes, findings, *, hidden="", name="fault"):
    """An outcome with findings given as pairs of a code and a severity."""
    case = wild.Case("program", "", name, "wrong labels", "", frozenset(codes), hidden)
    return wild.Outcome(
        case, tuple({"code": code, "severity": severity} for code, severity in findings)
    )


def test_every_fault_fits_its_program(wild):
    """Each change is found once in its program's text and leaves a program; faults of a program differ."""
    cases = wild.load()
    repaired = {case.program for case in cases if not case.name}
    assert {path.stem for path in wild.PROGRAMS.glob("*.toml")} == repaired
    assert len([case for case in cases if case.name]) >= 60
    assert len({case.source for case in cases}) == len(cases)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            {"kind": "bad luck", "fault": "", "codes": [], "change": []},
            "no such kind of fault: bad luck",
        ),
        ({"kind": "wrong labels", "fault": "", "change": []}, "needs either the codes"),
        (
            {"kind": "wrong labels", "fault": "", "codes": [], "hidden": "so", "change": []},
            "needs either the codes",
        ),
        (
            {"kind": "wrong labels", "fault": "", "codes": [], "change": [["x", "y"]]},
            "occurs 2 times",
        ),
        (
            {"kind": "wrong labels", "fault": "", "codes": [], "change": [["z", "y"]]},
            "occurs 0 times",
        ),
    ],
)
def test_a_declaration_that_does_not_fit_is_an_error(wild, fault, message):
    """A fault is not applied somewhere else, or nowhere, without a word."""
    with pytest.raises(ValueError, match=message):
        wild._faulty("program", "x = x\n", "fault", fault)


def test_figures(wild):
    """Info counts for recall alone; what training cannot show counts for precision alone; a code counts once a program."""
    totals = wild._totals(
        [
            outcome(wild, ["A"], [("A", "error"), ("A", "error"), ("B", "warning")]),
            outcome(wild, ["A", "C"], [("C", "info"), ("D", "info")]),
            outcome(wild, [], [("B", "info")]),
            outcome(wild, ["A"], []),
            outcome(wild, [], [("E", "warning")], hidden="it looks like a good run"),
            outcome(wild, [], [("B", "info")], name=""),
            outcome(wild, [], [("B", "warning")], name=""),
        ]
    )
    assert (totals["faulty"], totals["shown"], totals["found"], totals["recall"]) == (5, 4, 2, 0.5)
    assert (totals["right"], totals["false"], totals["precision"]) == (1, 2, 1 / 3)
    assert (totals["repaired"], totals["with an alarm"], totals["alarms"]) == (2, 1, 0.5)


def test_a_case_is_run_and_checked_as_a_user_would(wild, tmp_path):
    """A program without a loss that learns leaves a recording and its output; one that fails says so."""
    source = "import torch\nmodel = torch.nn.Linear(2, 1)\nprint('mean', model(torch.ones(8, 2)).mean().item() * 0)\n"
    result = wild.judge(wild.Case("small", source), tmp_path)
    assert not result.failure
    assert float(result.score) == 0
    assert result.findings == ()
    failing = wild.judge(wild.Case("small", source + "raise SystemExit(7)\n", "failing"), tmp_path)
    assert failing.verdict == "FAILED"
    assert failing.failure.startswith("exit status 7")
