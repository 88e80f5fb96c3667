"""Rows: what is derived from them, and that merging them loses nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kedge.store.recording import STATISTICS, Recording, Rows
from tests.store.histograms import count

NUMBERS = (
    "step",
    "level",
    "calls",
    "count",
    "sum",
    "sumsq",
    "min",
    "max",
    "nonzero",
    "nonfinite",
    "nan",
    "sampled",
    "saturated",
)


def measured(values: np.ndarray, step: int = 0, channels: int = 0) -> dict[str, Any]:
    """Measure values as the table on the device does."""
    flat = values.astype(np.float64).ravel()
    with np.errstate(invalid="ignore"):
        total = flat.sum()
    drawn = count(flat[None])[0]
    row: dict[str, Any] = {
        "sampled": flat.size,
        "saturated": int((flat > 2).sum()),
        "exponents": drawn,
    }
    row |= {"step": step, "site": 0, "calls": 1, "count": flat.size, "sum": total}
    row |= {
        "sumsq": (flat**2).sum(),
        "nonzero": np.count_nonzero(flat),
        "nonfinite": (~np.isfinite(flat)).sum(),
    }
    row["nan"] = np.isnan(flat).sum()
    row |= {"min": flat.min() if flat.size else np.nan, "max": flat.max() if flat.size else np.nan}
    if channels:
        row["active"] = (values.reshape(-1, channels) > 0).any(axis=0)
    return row


def recorded(rows: Sequence[Mapping[str, Any]], channels: int | None = None) -> Recording:
    """Return a recording of one site with these rows."""
    return Recording.build([{"site": "relu:out", "channels": channels}], rows)


def assert_same(left: Rows, right: Rows) -> None:
    """Compare rows column by column; NaN equals NaN."""
    for name in NUMBERS:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
    assert left.active == right.active
    assert left.exponents == right.exponents


@pytest.mark.parametrize("seed", range(3))
def test_every_statistic_is_what_numpy_computes(seed: int) -> None:
    """Each derived statistic of each step agrees with numpy on the elements themselves."""
    rng = np.random.default_rng(seed)
    steps = [
        np.maximum(rng.normal(1, 3, (32, 7)), 0).astype(np.float32).astype(np.float64)
        for _ in range(5)
    ]
    recording = recorded([measured(values, step) for step, values in enumerate(steps)])
    expected = {
        "mean": [v.mean() for v in steps],
        "rms": [np.sqrt((v**2).mean()) for v in steps],
        "std": [v.std() for v in steps],
        "absmax": [np.abs(v).max() for v in steps],
        "min": [v.min() for v in steps],
        "max": [v.max() for v in steps],
        "zero": [(v == 0).mean() for v in steps],
        "nonfinite": [0] * 5,
        "nan": [0] * 5,
        "inf": [0] * 5,
        "count": [v.size for v in steps],
        "saturated": [(v > 2).mean() for v in steps],
    }
    quantiles = {f"q{q:02}": [np.quantile(v[v > 0], q / 100) for v in steps] for q in (5, 50, 95)}
    for name, values in quantiles.items():
        ratios = recording.series("relu", name) / values
        assert (ratios > 0.5).all(), name
        assert (ratios < 2).all(), name

    assert {*expected, *quantiles} == set(STATISTICS)
    for name, values in expected.items():
        np.testing.assert_allclose(recording.series("relu", name), values, rtol=1e-12, err_msg=name)


def test_absmax_is_of_the_larger_end() -> None:
    """The greatest magnitude may be that of the minimum."""
    recording = recorded([measured(np.array([-5.0, 1.0]))])

    assert recording.series("relu", "absmax").tolist() == [5.0]


def test_std_of_equal_elements_is_zero() -> None:
    """Rounding in the sum of squares never makes the root of a negative number."""
    recording = recorded([measured(np.full(1000, 0.1))])

    assert recording.series("relu", "std")[0] == pytest.approx(0, abs=1e-8)


def test_nonfinite_elements_reach_every_statistic_they_touch() -> None:
    """NaN elements make the statistics NaN and are counted, apart from infinities."""
    recording = recorded([measured(np.array([1.0, np.nan, np.nan, np.inf, -np.inf, -np.inf]))])

    values = {name: recording.series("relu", name)[0] for name in STATISTICS}
    assert (values["nonfinite"], values["nan"], values["inf"], values["count"]) == (5, 2, 3, 6)
    assert all(np.isnan(values[name]) for name in ("mean", "rms", "std", "absmax", "min", "max"))


def test_what_was_not_measured_is_nan() -> None:
    """A statistic that was left out is NaN, except that a finite sum shows that all was finite."""
    recording = recorded([{"step": 3, "site": 0, "count": 4, "sum": 8.0}])

    values = {name: recording.series("relu", name)[0] for name in STATISTICS}
    drawn = {"saturated", "q05", "q50", "q95"}
    missing = {name for name, value in values.items() if np.isnan(value)}
    assert missing == {"rms", "std", "absmax", "min", "max", "zero"} | drawn
    assert (values["mean"], values["count"], values["nonfinite"]) == (2.0, 4.0, 0.0)


def test_a_site_that_held_no_element_has_no_scale() -> None:
    """With a count of zero everything but the count is NaN or zero, without a warning."""
    recording = recorded([measured(np.zeros(0))])

    values = {name: recording.series("relu", name)[0] for name in STATISTICS}
    assert (values["count"], values["nonfinite"]) == (0, 0)
    assert all(
        np.isnan(values[name]) for name in ("mean", "rms", "std", "absmax", "min", "max", "zero")
    )


def test_an_unknown_statistic_names_those_there_are() -> None:
    """A wrong statistic is an error that lists the right ones."""
    with pytest.raises(
        ValueError, match="'median' is not a statistic of a recording; there are mean, rms, std, "
    ):
        recorded([]).series("relu", "median")


ELEMENTS = hnp.arrays(
    np.float64,
    st.tuples(st.integers(0, 12), st.just(5)),
    elements=st.one_of(st.integers(-8, 8).map(float), st.sampled_from([np.nan, np.inf, -np.inf])),
)


@settings(max_examples=300, deadline=None)
@given(ELEMENTS, st.data())
def test_rows_split_in_any_way_merge_to_the_whole(values: np.ndarray, data: st.DataObject) -> None:
    """However the elements of a step are dealt to ranks and batches, the merged row is that of all of them."""
    parts = data.draw(st.integers(1, 4))
    share = np.array(
        data.draw(st.lists(st.integers(0, parts - 1), min_size=len(values), max_size=len(values))),
        int,
    )
    whole = {**measured(values, 7, channels=5), "calls": parts}
    split = [measured(values[share == part], 7, channels=5) for part in range(parts)]

    merged = recorded(data.draw(st.permutations(split)), channels=5)
    assert_same(merged.rows("relu"), recorded([whole], channels=5).rows("relu"))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5)), min_size=1, max_size=20),
    st.randoms(),
)
def test_the_order_of_rows_does_not_matter(given_rows: list[tuple[int, int]], random: Any) -> None:
    """Rows of several steps read in any order give the same rows, sorted by step."""
    rows = [measured(np.array([float(value)]), step) for step, value in given_rows]
    mixed = list(rows)
    random.shuffle(mixed)

    assert_same(recorded(mixed).rows("relu"), recorded(rows).rows("relu"))
    assert recorded(mixed).rows("relu").step.tolist() == sorted({step for step, _ in given_rows})


def test_what_one_rank_did_not_measure_comes_from_the_other() -> None:
    """Something is unmeasured in a merged row only if no rank measured it."""
    bare = {"step": 0, "site": 0, "count": 2, "sum": 1.0}
    merged = recorded([bare, measured(np.array([2.0, -3.0])), bare]).rows("relu")
    nothing = recorded([bare, bare]).rows("relu")

    assert (merged.sum[0], merged.sumsq[0], merged.min[0], merged.max[0]) == (1.0, 13.0, -3.0, 2.0)
    assert (merged.nonzero[0], merged.nonfinite[0], merged.count[0]) == (2, 0, 6)
    assert np.isnan([nothing.sumsq[0], nothing.min[0], nothing.max[0]]).all()
    assert (nothing.nonzero[0], nothing.nonfinite[0]) == (-1, -1)


def test_a_nan_on_one_rank_is_never_merged_away() -> None:
    """A rank whose sum is not finite makes the merged scale NaN, even if it measured nothing else."""
    broken = {"step": 0, "site": 0, "count": 2, "sum": np.nan, "level": 1}
    merged = recorded([measured(np.array([2.0, -3.0])), broken])

    assert np.isnan([merged.series("relu", name)[0] for name in ("mean", "rms", "absmax")]).all()


def test_counts_that_a_part_does_not_have_are_unknown_in_the_whole() -> None:
    """A part of an older version counted bad elements together; of a finite part nothing is lacking."""
    old = measured(np.array([np.nan, np.inf])) | {"nan": -1}
    merged = recorded([old, measured(np.array([np.nan, 2.0]))])
    sound = recorded(
        [measured(np.array([1.0, 2.0])) | {"nan": -1}, measured(np.array([np.nan, np.inf]))]
    )

    assert (merged.rows("relu").nonfinite[0], merged.rows("relu").nan[0]) == (3, -1)
    assert np.isnan([merged.series("relu", name)[0] for name in ("nan", "inf")]).all()
    assert [sound.series("relu", name)[0] for name in ("nonfinite", "nan", "inf")] == [2, 1, 1]


def test_rows_off_schedule_are_rows_but_no_steps() -> None:
    """A row in which only finiteness was checked is among the rows and not in any series."""
    off = {"step": 4, "site": 0, "count": 2, "sum": np.inf, "level": 1}
    recording = recorded([measured(np.ones(2), 0), off, measured(np.ones(2), 10)])

    assert recording.rows("relu").step.tolist() == [0, 4, 10]
    assert recording.rows("relu").level.tolist() == [2, 1, 2]
    assert recording.steps.tolist() == [0, 10]
    assert recording.series("relu", "mean").tolist() == [1, 1]


def test_channels_are_active_in_a_step_if_they_were_on_any_rank() -> None:
    """The channel bits of the ranks are joined, and untracked steps are left out."""
    bits = np.zeros(11, bool)
    rows = [
        {"step": 0, "site": 0, "count": 22, "active": bits | (np.arange(11) == 1)},
        {"step": 0, "site": 0, "count": 11, "active": bits | (np.arange(11) == 10)},
        {"step": 0, "site": 0, "count": 0},
        {"step": 5, "site": 0, "count": 22},
        {"step": 9, "site": 0, "count": 22, "active": bits},
    ]
    steps, samples, active = recorded(rows, channels=11).active("relu")

    assert steps.tolist() == [0, 9]
    assert samples.tolist() == [3, 2]
    assert active.shape == (2, 11)
    assert [np.flatnonzero(row).tolist() for row in active] == [[1, 10], []]


def test_a_site_without_channels_has_no_active_ones() -> None:
    """Asking for channels where none were tracked gives empty arrays."""
    steps, samples, active = recorded([measured(np.ones(3))]).active("relu")

    assert (len(steps), len(samples), active.shape) == (0, 0, (0, 0))
