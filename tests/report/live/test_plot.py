"""Curves in braille."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kedge.report.live.plot import EMPTY, plot


def dots(rows: tuple[str, ...]) -> np.ndarray:
    """Return the dots of a drawn curve as a matrix, the highest row first."""
    bits = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]]
    cells = np.array([[ord(cell) - EMPTY for cell in row] for row in rows])
    lines = [[(cells & bit) > 0 for bit in pair] for pair in bits]
    stacked = np.stack([np.stack(pair, axis=2).reshape(len(rows), -1) for pair in lines], axis=1)
    return stacked.reshape(4 * len(rows), -1)


def test_a_rising_line_rises() -> None:
    """One value a column of dots: the dots climb from the lowest row to the highest, without a gap."""
    drawn = plot(np.arange(8.0), width=4, height=2)

    assert drawn is not None
    assert (drawn.low, drawn.high, drawn.logarithmic) == (0.0, 7.0, False)
    tops = dots(drawn.rows).argmax(axis=0)
    assert tops.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


def test_columns_are_connected() -> None:
    """A jump is drawn as a line from one value to the other."""
    drawn = plot(np.array([0.0, 9.0]), width=1, height=2)

    assert drawn is not None
    assert dots(drawn.rows).sum(axis=0).tolist() == [1, 8]


def test_a_column_of_many_steps_shows_the_extremes() -> None:
    """Where steps share a column of dots, a single spike among them is seen."""
    values = np.ones(1000)
    values[500] = 5.0
    drawn = plot(values, width=10, height=4)

    assert drawn is not None
    assert drawn.high == 5.0
    assert dots(drawn.rows)[0].sum() >= 1


def test_what_is_not_finite_leaves_a_gap() -> None:
    """Steps without a finite value have no dot, and the scale is that of the others."""
    drawn = plot(np.array([1.0, np.nan, np.inf, 2.0]), width=2, height=1)

    assert drawn is not None
    assert (drawn.low, drawn.high) == (1.0, 2.0)
    assert dots(drawn.rows).any(axis=0).tolist() == [True, False, False, True]
    assert plot(np.array([np.nan, np.inf]), 4, 2) is None
    assert plot(np.zeros(0), 4, 2) is None


def test_powers_of_ten_are_drawn_on_a_logarithmic_scale() -> None:
    """Values that span decades, all above zero, are evenly spread over the height."""
    drawn = plot(10.0 ** np.arange(8), width=4, height=2)

    assert drawn is not None
    assert drawn.logarithmic
    assert dots(drawn.rows).argmax(axis=0).tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.filterwarnings("error")
@given(
    hnp.arrays(np.float64, st.integers(0, 60), elements=st.floats(allow_nan=True)),
    st.integers(1, 12),
    st.integers(1, 5),
)
def test_whatever_is_drawn_fits(values: np.ndarray, width: int, height: int) -> None:
    """Any values, the largest and smallest floats too, make a picture of the size that was asked for."""
    drawn = plot(values, width, height)

    assert (drawn is None) == (not np.isfinite(values).any())
    if drawn is not None:
        assert [len(row) for row in drawn.rows] == [width] * height
        assert dots(drawn.rows).any()
