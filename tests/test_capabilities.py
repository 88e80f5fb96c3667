"""Every row of benchmarks/capabilities.py is answered by Kedge as the table has it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PARTLY = (33, 34, 35, 43)
NOT_OFFERED = (40,)
SLOW = (27, 30, 31, 32, 33, 34, 43)
"""Rows that run programs as processes."""

pytestmark = pytest.mark.timing


@pytest.fixture(scope="module")
def capabilities():
    """The benchmark as a module."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        benchmark = importlib.import_module("capabilities")
        patch.setattr(benchmark.compiled, "BACKEND", "aot_eager")
        yield benchmark
    for name in set(sys.modules) - before:
        if name == "capabilities" or name.partition(".")[0] == "capable":
            del sys.modules[name]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=pytest.mark.full if number in SLOW else ())
        for number in range(1, 44)
    ],
)
def test_a_row_is_answered(capabilities, number):
    """Yes, but for the rows that are not offered or only in part."""
    (answer,) = capabilities.column("Kedge", [number]).values()

    expected = "yes"
    if number in PARTLY:
        expected = "partly"
    if number in NOT_OFFERED:
        expected = "no"
    assert answer.word == expected, str(answer)


def test_a_wrong_result_is_a_no(capabilities):
    """With what is wrong; an error of the tool is one too, and what is partly there is told apart."""
    row = sys.modules["capable.row"]

    def wrong():
        row.check(False, "one is not two")

    def fails():
        raise ZeroDivisionError("of a tool\nby zero")

    def half():
        raise row.Partly("half of it")

    assert str(row.ask(wrong)) == "no: one is not two"
    assert str(row.ask(fails)) == "no: ZeroDivisionError: by zero"
    assert str(row.ask(half)) == "partly: half of it"
    assert str(row.ask(lambda: None)) == "yes"


def test_the_table_has_a_line_for_each_row(capabilities):
    """With the reason, and with nothing where a tool has no program."""
    answers = {40: capabilities.Answer("no", "not offered", 0.5)}
    lines = capabilities.table({"Kedge": answers, "captum": {}}, [40]).splitlines()

    assert lines[0] == "|  |  | Kedge |  | s | captum |"
    assert lines[2:] == ["| 40 | models that run on a server | no | not offered | 0.50 |  |"]
