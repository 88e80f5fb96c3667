"""The table of headroom: how near numbers came to the ends of their format."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from rich.console import Console

from kedge.errors import NoSuchSite
from kedge.report.headroom import reaches, render_headroom
from kedge.store.formats import FORMATS
from kedge.store.recording import Recording
from tests.store.histograms import count

HALF, EIGHT = FORMATS["float16"], FORMATS["float8_e4m3fn"]


def recorded(*steps: np.ndarray, dtype: str = "float32") -> Recording:
    """Return a recording of one output that held these values, step by step."""
    rows = [
        {
            "step": i, "site": "fc:out", "count": v.size, "min": v.min(), "max": v.max(), "sum": v.sum(),
            "sumsq": (v**2).sum(), "nonfinite": 0, "sampled": v.size, "exponents": count(v[None])[0],
        }
        for i, v in enumerate(steps)
    ]  # fmt: skip
    return Recording.build([{"site": "fc:out", "dtype": dtype, "type": "Linear"}], rows)


def drawn(recording: Recording, **options: str) -> str:
    """Draw the table as plain text."""
    console = Console(file=io.StringIO(), width=100)
    render_headroom(recording, console, **options)
    return console.file.getvalue()


def test_the_largest_magnitude_of_the_run_counts() -> None:
    """Headroom is counted from the largest value of any step, whatever its sign."""
    (reach,) = reaches(
        recorded(np.array([1.0, 2.0]), np.array([-16376.0, 1.0]), np.array([3.0, 4.0]))
    )
    assert reach.largest == 16376.0
    assert reach.headroom(HALF) == 2.0
    assert reach.headroom(EIGHT) < 0


def test_the_share_under_the_smallest_normal_number_is_that_of_all_steps() -> None:
    """Elements of every step count alike; zeros do not count."""
    (reach,) = reaches(recorded(np.array([2.0**-15, 1.0, 0.0]), np.array([1.0, 1.0, 0.0])))
    assert reach.under(HALF) == 0.25
    assert reach.under(FORMATS["float32"]) == 0.0


def test_the_distance_to_the_smallest_normal_number_is_that_of_the_small_end() -> None:
    """It is counted in halvings, from the magnitude under which 5 % of the elements lie; below, it is negative."""
    (reach,) = reaches(recorded(np.full(100, 1.5 * 2.0**-10)))
    assert 2.0**-10 <= reach.small < 2.0**-9
    assert reach.depth(HALF) == pytest.approx(4, abs=0.1)
    assert reach.depth(EIGHT) == pytest.approx(-4, abs=0.1)
    assert reach.depth(FORMATS["float32"]) == pytest.approx(116, abs=0.1)


def test_one_element_near_zero_is_not_the_small_end() -> None:
    """The smallest of all says how many were drawn rather than how the values lie."""
    (reach,) = reaches(recorded(np.array([1e-12, *[1.0] * 99])))
    assert reach.small >= 1.0


def test_what_was_never_measured_in_full_has_no_figures() -> None:
    """A site of light steps alone shows dashes."""
    recording = Recording.build(
        ["fc:out"], [{"step": 0, "site": "fc:out", "count": 4, "sumsq": 1.0, "level": 1}]
    )
    (reach,) = reaches(recording)
    assert math.isnan(reach.largest)
    assert math.isnan(reach.under(HALF))
    assert math.isnan(reach.depth(HALF))
    assert drawn(recording).splitlines()[1].split().count("-") >= 10


def test_the_table_has_a_column_for_each_format() -> None:
    """Its own format, and what would be in fp16, bf16 and the two of eight bits."""
    head, line, *_ = drawn(recorded(np.array([200.0, 1e-6, 1.0, 1.0]))).splitlines()
    assert head.split() == [
        "site",
        "dtype",
        "largest",
        "small",
        "own",
        "fp16",
        "bf16",
        "fp8",
        "e5m2",
        "fp8",
        "e4m3",
    ]
    assert line.split() == [
        *("fc:out", "float32", "200", "1.1e-6"),
        *("120", "106", "0%"),
        *("8.4", "-5.8", "25%"),
        *("120", "106", "0%"),
        *("8.2", "-5.8", "25%"),
        *("1.2", "-14", "25%"),
    ]


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    """The error is the one that the report gives."""
    with pytest.raises(NoSuchSite):
        drawn(recorded(np.ones(3)), pattern="nothing")
