"""The course of a site's scale, and its picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from kedge.report.curves import ScaleSeries, scale_series
from kedge.store.recording import Recording

FINITENESS = 1


def row(step: int, rms: float, **columns: Any) -> dict[str, Any]:
    """Describe a row whose root mean square is given."""
    figures = {"sum": rms * 4, "sumsq": rms**2 * 4, "min": -rms, "max": rms}
    return {"step": step, "site": "a:out", "count": 4, **figures, **columns}


def followed(rows: Sequence[dict[str, Any]], steps: Sequence[int] = ()) -> ScaleSeries:
    """Follow the only site of a recording; ``steps`` are sampled at another site."""
    others = [row(step, 1.0, site="b:out") for step in steps]
    recording = Recording.build(["a:out", "b:out"], [*rows, *others])
    return scale_series(recording, recording.site("a:out"))


def drawn(values: Sequence[float], width: int = 40) -> str:
    """Draw values of successive steps."""
    seen = followed([row(step, value) for step, value in enumerate(values)])
    return seen.drawn(width, "").plain


def test_the_scale_is_logarithmic() -> None:
    """Equal factors are equal heights, from the smallest to the largest."""
    assert drawn([10.0**power for power in range(8)]) == "▁▂▃▄▅▆▇█"


def test_small_changes_look_flat() -> None:
    """What stays within a few percent is one height, whatever its scale."""
    assert drawn([1.0, 1.05, 0.97, 1.02]) == drawn([1e9, 1.05e9, 0.97e9, 1.02e9]) == "▄▄▄▄"


def test_a_factor_of_two_is_seen() -> None:
    """A change that matters is a step in the picture."""
    assert drawn([1.0, 2.0, 4.0]) == "▂▄▆"


def test_what_is_not_finite_is_a_cross() -> None:
    """NaN and infinities show where they were."""
    assert drawn([1.0, math.nan, 1.0, math.inf]) == "▄✗▄✗"


def test_exact_zeros_and_gaps_are_told_apart() -> None:
    """A step of nothing but zeros is a 0, a step without a value is a gap."""
    seen = followed([row(0, 0.0), row(2, 1.0), row(3, 0.0)], steps=range(5))

    assert seen.drawn(40, "").plain == "0 ▄0 "


def test_many_steps_are_drawn_by_their_largest() -> None:
    """A single spike or cross is seen however many steps share a character."""
    values = [1.0] * 1000
    values[500] = 1000.0
    values[900] = math.nan

    assert drawn(values, width=10) == "▁▁▁▁▁█▁▁▁✗"


@pytest.mark.parametrize("steps", [1, 9, 10, 11, 99, 1001])
def test_the_picture_never_exceeds_its_width(steps: int) -> None:
    """There is a character a step, or as many as fit."""
    assert len(drawn([1.0] * steps, width=10)) == min(steps, 10)


def test_an_off_schedule_step_counts_to_the_sampled_one_before_it() -> None:
    """What broke between two measured steps is drawn, counted, and is the newest state of affairs."""
    between = row(15, math.nan, level=FINITENESS, min=math.nan, max=math.nan)

    seen = followed([row(0, 1.0), row(10, 1.0), between, row(20, 2.0)])

    assert seen.drawn(40, "").plain == "▃✗▅"
    assert (seen.broken_steps, seen.last) == (1, 2.0)


@pytest.mark.parametrize(
    ("rows", "last"),
    [
        ([row(0, 1.0), row(10, 3.0)], 3.0),
        ([row(0, 1.0)], 1.0),
        ([], None),
        ([row(0, 1.0), row(10, math.inf)], math.inf),
        ([row(0, 1.0), row(20, math.nan, level=FINITENESS, min=math.nan, max=math.nan)], math.nan),
    ],
)
def test_the_last_value_is_the_newest(rows: list[dict[str, Any]], last: float | None) -> None:
    """The newest value is given, also where the site did not fire at the end, and when it is not finite."""
    assert followed(rows, steps=[0, 10]).last == pytest.approx(last, nan_ok=True)
