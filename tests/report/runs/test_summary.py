"""What a table says of each run: its options, and the figures of its loss."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kedge.report.runs.options import Differing, options_of
from kedge.report.runs.summary import RunSummary, numbered, smoothed, told_apart
from kedge.report.runs.table import RunTable
from kedge.report.shown_run import ShownRun
from kedge.store.recording import Recording
from tests.report.runs.conftest import Written, summary_of, table_of


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--lr 0.1 --steps 20", {"--lr": "0.1", "--steps": "20"}),
        ("--lr=0.1 -v", {"--lr": "0.1", "-v": "yes"}),
        ("--shift -3 --scale -1.5e-3", {"--shift": "-3", "--scale": "-1.5e-3"}),
        ("--layers 64 32 --amp", {"--layers": "64 32", "--amp": "yes"}),
        ("--tag a --tag b", {"--tag": "a b"}),
        (
            "optim.lr=0.1 +model=gpt data.txt",
            {"optim.lr": "0.1", "model": "gpt", "argument 1": "data.txt"},
        ),
        ("train data --lr 1", {"argument 1": "train", "argument 2": "data", "--lr": "1"}),
        ("--name= --lr 1", {"--name": "", "--lr": "1"}),
        ("- --", {"argument 1": "-", "argument 2": "--"}),
        ("", {}),
    ],
)
def test_the_words_of_a_command_are_options(words: str, options: dict[str, str]) -> None:
    """Values follow as words or after an equals sign; a negative number is a value."""
    assert options_of(["train.py", *words.split()]) == options


def test_options_differ_if_one_run_lacks_them() -> None:
    """The others are equal in all, and keep their order."""
    found = Differing.among([{"a": "1", "b": "2", "c": "x"}, {"a": "1", "b": "3"}])
    assert found.names == ("b", "c")
    assert found.equal == {"a": "1"}


def test_smoothing_is_that_of_tensorboard() -> None:
    """The average of 1, 2, 3 that keeps 0.5: its weights add up to 1 from the first value on; a gap stays a gap."""
    values = np.array([1.0, 2.0, math.nan, 3.0, math.inf])
    expected = [
        1.0,
        (0.25 * 1 + 0.5 * 2) / 0.75,
        math.nan,
        (0.125 + 0.25 * 2 + 0.5 * 3) / 0.875,
        math.nan,
    ]
    np.testing.assert_allclose(smoothed(values, 0.5), expected)
    np.testing.assert_array_equal(smoothed(values[:2], 0.0), values[:2])


def test_names_are_as_short_as_they_differ() -> None:
    """Folders are named where they are needed, and never if the source is left out."""
    paths = ["a/run.kedge", "b/run.kedge", "b/other", "/x/b/more.kedge/"]
    assert told_apart(paths) == ["a/run", "b/run", "other", "more"]
    assert numbered(paths) == ["run", "run (2)", "other", "more"]
    assert told_apart(["x/run", "x/run"]) == ["x/run", "x/run"]


def test_figures_of_a_run(three: RunTable) -> None:
    """The last loss and the best one are smoothed; a run that breaks ends with NaN and keeps its best step."""
    slow, fast, other = three.runs
    assert slow.loss is not None
    assert fast.loss is not None
    assert 0.1 < slow.loss.last < 2.1
    assert slow.loss.last == slow.loss.best
    assert math.isnan(fast.loss.last)
    assert (fast.loss.best_step, fast.loss.broken) == (13, 6)
    assert (slow.steps, slow.seconds, slow.pace) == (12, 6.0, 0.5)
    assert (other.steps, other.seconds, other.pace, other.ending) == (12, None, None, "no end")
    assert three.differing.names == ("model", "--lr", "--amp")


def test_a_run_that_goes_on_has_a_duration_so_far(written: Written) -> None:
    """It is the time until it was last written."""
    going = summary_of(written("going", ended=False), written=True, wrote=1_795_244_400.0 + 90)
    assert (going.ending, going.seconds) == ("running", 90.0)


def test_the_ranks_of_a_run_count_together() -> None:
    """Their losses are one curve; their number is an option like any other."""
    rows = [
        {
            "step": step,
            "site": "loss",
            "rank": rank,
            "calls": 1,
            "count": 1,
            "sum": 2.0 * rank,
            "sumsq": 4.0 * rank,
        }
        for step in range(3)
        for rank in range(2)
    ]
    sites = [{"site": "loss", "path": "loss", "kind": "loss", "shape": []}]
    optimizers = {
        "kind": "optimizers",
        "optimizers": [{"type": "SGD", "steps": 3, "roots": [0], "rates": [0.1]}],
    }
    roots = [{"name": "Net", "prefix": "", "parameters": 12}]
    recording = Recording.build(sites, rows, {"world": 2}, [optimizers], roots)
    run = RunSummary("ranks", ShownRun(recording))
    assert run.options["ranks"] == "2"
    assert (run.options["model"], run.options["optimizer"], run.options["learning rate"]) == (
        "Net 12",
        "SGD",
        "0.1",
    )
    assert run.loss is not None
    assert run.loss.last == 1.0


def test_the_table_of_runs_without_a_loss_has_no_such_column(written: Written) -> None:
    """A run of which nothing was recorded has a line all the same."""
    table = table_of(written("empty", steps=0, ended=False))
    assert [column.key for column in table.figures] == ["steps", "started"]
    assert table.document()["runs"][0]["loss"] is None
