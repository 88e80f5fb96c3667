"""The programs of benchmarks/against.py can be repeated as it says."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def against():
    """The benchmark as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        yield importlib.import_module("against")
        for name in ("against", "faults_in_the_wild", "trials"):
            del sys.modules[name]


def test_every_program_can_be_repeated(against):
    """Each repetition is a program with another text, and no two are the same."""
    good = {case.program: case for case in against.load() if not case.name}

    assert against.VARIED.keys() <= good.keys()
    for program in against.VARIED:
        repeated = {case.source for case in against.repetitions(good[program])}
        assert len(repeated) == len(against.REPETITIONS)
        assert good[program].source not in repeated
        for source in repeated:
            compile(source, program, "exec")


def test_a_number_is_rescaled_in_its_place(against):
    """The number between the bars is changed, and nothing else."""
    assert against.rescaled("for i in range(10): f(10)", "range(|10|)", 0.6) == (
        "for i in range(6): f(10)"
    )
    with pytest.raises(ValueError, match="must occur once"):
        against.rescaled("range(10)", "range(|12|)", 2.0)
