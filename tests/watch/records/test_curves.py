"""Single numbers of every step: written together, and as they are."""

from __future__ import annotations

import math

import pytest
import torch

from kedge.watch.records.curves import Curves, number_of
from kedge.watch.run.sinks import rows_of


def test_numbers_are_written_together_with_their_steps() -> None:
    """A number on a device is the same row as one that is known; nothing is handed over twice, or before its step."""
    curves = Curves()
    assert not curves.add_value(3, 0, 2.0, measured=True)
    assert not curves.add_value(4, 0, torch.tensor(-3.0), measured=False)
    curves.add_norm(4, 1, 10, 9.0, measured=False)
    assert curves.add_value(5, 0, math.inf, measured=False)
    curves.add_value(6, 0, 2.0, measured=True)
    columns = curves.take(5)
    assert columns is not None
    assert curves.take(5) is None
    assert (columns["step"].tolist(), columns["site"].tolist()) == ([3, 4, 4, 5], [0, 0, 1, 0])
    assert (columns["level"].tolist(), columns["count"].tolist()) == ([2, 1, 1, 1], [1, 1, 10, 1])
    assert columns["sumsq"].tolist() == [4.0, 9.0, 9.0, math.inf]
    assert columns["sum"][:2].tolist() == [2.0, -3.0]
    assert columns["nonfinite"].tolist() == [0, 0, -1, 1]
    assert columns["nan"].tolist() == [0, 0, -1, 0]


@pytest.mark.parametrize(
    ("number", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "inf")]
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_nan_and_an_infinity_are_told_apart(number: float, word: str, as_tensor: bool) -> None:
    """In the row of a single number, which is a loss; a NaN has no infinite square."""
    curves = Curves()
    curves.add_value(0, 0, torch.tensor(number) if as_tensor else number, measured=False)
    columns = curves.take(0, wait=True)
    assert columns is not None
    rows = rows_of(0, columns)
    assert [rows.statistic(name)[0] for name in ("nonfinite", word)] == [1, 1]
    assert rows.has_nan[0] == (word == "nan")
    assert math.isnan(rows.sumsq[0]) == (word == "nan")


def test_the_rows_of_a_step_that_does_not_count_are_dropped() -> None:
    """What came after the last step is no step."""
    curves = Curves()
    for step in range(3):
        curves.add_value(step, 0, 1.0, measured=False)
    curves.drop(2)
    columns = curves.take(2)
    assert columns is not None
    assert columns["step"].tolist() == [0, 1]


def test_many_numbers_do_not_wait() -> None:
    """Nothing is due where nothing waits."""
    curves = Curves()
    assert not curves.is_due()
    for step in range(256):
        assert not curves.is_due()
        curves.add_value(step, 0, 1.0, measured=False)
    assert curves.is_due()


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (torch.tensor(2.5), 2.5),
        (torch.tensor([1.0, 3.0]), 2.0),
        (torch.tensor(3 + 4j), 5.0),
        (torch.tensor(7), math.nan),
    ],
)
def test_a_loss_of_any_kind_is_a_number(value: torch.Tensor, number: float) -> None:
    """The mean of several, the size of a complex one."""
    assert number_of(value) == pytest.approx(number, nan_ok=True)
