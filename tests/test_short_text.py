"""Figures as short text."""

from __future__ import annotations

import math

import pytest

from kedge.short_text import compact, counted, percent, seconds, thousands, told_apart


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1.00"),
        (-1.5, "-1.50"),
        (0.0123456, "0.0123"),
        (0.0099999, "0.0100"),
        (0.00123, "1.2e-3"),
        (12.345, "12.3"),
        (999.96, "1000"),
        (9999.4, "9999"),
        (9999.6, "1.0e4"),
        (1.23e-30, "1.2e-30"),
        (9.99e9, "1.0e10"),
        (5e-324, "4.9e-324"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_a_figure_is_short(value: float, text: str) -> None:
    """Three digits, or two and a power of ten where the figure is far from one."""
    assert compact(value) == text


@pytest.mark.parametrize("power", range(-99, 100))
def test_a_positive_figure_fits_its_column(power: int) -> None:
    """No scale that a float32 can have is wider than seven characters."""
    assert max(len(compact(digit * 10.0**power)) for digit in (1, 9.4999, 9.9951, 9.99999)) <= 7


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1k"),
        (12_345, "12.3k"),
        (999_600, "1M"),
        (4_560_000, "4.56M"),
        (7 * 10**9, "7G"),
    ],
)
def test_a_count_is_short(number: int, text: str) -> None:
    """Large counts have a unit."""
    assert thousands(number) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0.0 %"), (0.0001, "< 0.1 %"), (0.033, "3.3 %"), (1.0, "100.0 %"), (2.5, "250.0 %")],
)
def test_a_share_is_a_percentage(share: float, text: str) -> None:
    """What is there does not round to nothing."""
    assert percent(share) == text


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (0.0, "0 s"),
        (0.4123, "0.412 s"),
        (12.34, "12.3 s"),
        (99.96, "1 min 40 s"),
        (3599.6, "1 h 0 min"),
        (7500, "2 h 5 min"),
    ],
)
def test_a_duration_has_its_unit(duration: float, text: str) -> None:
    """Seconds, then minutes, then hours."""
    assert seconds(duration) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0 steps"), (1, "1 step"), (1200, "1,200 steps")])
def test_a_number_has_its_noun(number: int, text: str) -> None:
    """The noun agrees with the number."""
    assert counted(number, "step") == text


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["A", "B"], ("A", "B")),
        (["A", "B", "A"], ("1st A", "B", "2nd A")),
        (["A"] * 13, ("1st A", "2nd A", "3rd A", *(f"{i}th A" for i in range(4, 14)))),
        ([], ()),
    ],
)
def test_names_that_are_the_same_are_told_apart(names: list[str], told: tuple[str, ...]) -> None:
    """By their place among those with this name; a name that is the only one stays as it is."""
    assert told_apart(names) == told
