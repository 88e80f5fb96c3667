"""Two recordings, compared at every site in every step."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.compare.comparison import compare
from kedge.compare.measures import coarser, eps
from kedge.compare.verdict import judge
from kedge.errors import CannotCompare
from kedge.report.compare.page import log_ratios
from kedge.store.recording import Recording
from tests.compare.stories import FULL, LIGHT, NET, from_step, story

few = settings(max_examples=40, deadline=None, derandomize=True, database=None)
NAN, INF = math.nan, math.inf


def one(
    *values: float, statistic: str = "sumsq", level: int = FULL, kind: str = "out", **entry: object
) -> Recording:
    """A recording of one site, of which one column was measured, in steps 0, 1, ..."""
    rows = [
        {"step": i, "site": 0, "count": 1, statistic: value, "level": level}
        for i, value in enumerate(values)
    ]
    return Recording.build([{"site": f"fc:{kind}", "kind": kind, "type": "Linear", **entry}], rows)


def test_a_recording_does_not_differ_from_itself() -> None:
    """Nothing is apart, every value was compared, and all steps are common."""
    found = compare(story(), story())

    assert found.first is None
    assert not np.isnan(found.apart).any()
    assert found.values == 27 * 4
    assert (found.steps.tolist(), found.full) == ([0, 1, 2, 3], 4)


def test_the_first_parting_is_the_first_site_of_the_first_step() -> None:
    """Steps come first, then the order of the data; the statistic that is furthest apart is named."""
    found = compare(
        story(),
        story(
            factor=from_step(2, 1.25, "act:out", "mid:out", "head:out.grad", "head.weight:update")
        ),
    )

    assert found.first is not None
    assert (found.first.step, found.first.same.text, found.first.statistic) == (2, "mid:out", "rms")
    assert found.first.b / found.first.a == pytest.approx(1.25)
    assert found.first.apart == pytest.approx(0.2)


def test_a_parameter_comes_before_the_pass_it_is_used_in() -> None:
    """A parameter is written after the forward pass of its step, and is named before it."""
    found = compare(story(), story(factor=from_step(1, 1.1, "head.weight:param", "stem:out")))

    assert found.first is not None
    assert found.first.same.text == "head.weight:param"


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        (4.0, 4.0, 0.0),
        (4.0, 1.0, 0.5),
        (0.0, 0.0, 0.0),
        (0.0, 3.0, 1.0),
        (NAN, NAN, 0.0),
        (INF, INF, 0.0),
        (INF, 1.0, INF),
        (1.0, NAN, INF),
    ],
)
def test_how_far_two_sizes_are_apart(a: float, b: float, apart: float) -> None:
    """The distance is relative to the larger one; what is not finite on one side alone is infinitely far."""
    one_, other = _sized(a), _sized(b)

    assert compare(one_, other).apart.tolist() == [[apart]]
    assert compare(other, one_).apart.tolist() == [[apart]]


def _sized(sumsq: float) -> Recording:
    row = {
        "step": 0,
        "site": 0,
        "count": 1,
        "sumsq": sumsq,
        "nonfinite": 0 if math.isfinite(sumsq) else 1,
    }
    return Recording.build([{"site": "fc:out"}], [row])


def test_a_mean_is_compared_in_units_of_the_scale() -> None:
    """A mean around zero is hardly more than rounding: another one is not a large difference."""
    rows = [
        {"step": 0, "site": 0, "count": 4, "sumsq": 4.0, "min": -1.0, "max": 1.0} for _ in range(2)
    ]
    a, b = (
        Recording.build(["fc:out"], [{**row, "sum": s}])
        for row, s in zip(rows, (4e-7, -4e-7), strict=True)
    )
    found = compare(a, b)

    assert found.apart.item() == pytest.approx(2e-7)
    assert found.first is not None
    assert found.first.statistic == "mean"


def test_an_extreme_is_compared_in_units_of_the_larger_extreme() -> None:
    """The smaller one of minimum and maximum is not blown up."""
    rows = [
        {"step": 0, "site": 0, "count": 4, "sumsq": 4.0, "sum": 0.0, "max": 2.0, "min": low}
        for low in (0, -0.01)
    ]
    a, b = (Recording.build(["fc:out"], [row]) for row in rows)

    assert compare(a, b).apart.item() == pytest.approx(0.005)


def test_what_one_side_did_not_measure_is_not_compared() -> None:
    """A column that only one side has is no difference."""
    found = compare(one(1.0, 4.0, statistic="sumsq"), one(1.0, 1.0, statistic="sum"))

    assert found.first is None
    assert found.apart.tolist() == [[0.0, 0.0]]  # both are finite and of one element


def test_one_element_more_is_a_difference() -> None:
    """Batches of other sizes part even where their statistics do not."""
    a, b = (
        Recording.build(["fc:out"], [{"step": 0, "site": 0, "count": n, "sumsq": 0.0}])
        for n in (8, 6)
    )
    first = compare(a, b).first

    assert first is not None
    assert (first.statistic, first.a, first.b, first.apart) == ("count", 8, 6, 0.25)
    assert first.ulps is None


def test_the_tolerance_is_an_upper_limit() -> None:
    """A difference as large as the tolerance still counts as none."""
    a, b = one(4.0), one(1.0)

    assert compare(a, b, tolerance=0.49).first is not None
    assert compare(a, b, tolerance=0.5).first is None


def test_a_distance_is_given_in_units_of_the_coarser_format() -> None:
    """Ulps are those of the dtype that rounds more."""
    step = 2.0**-7
    found = compare(one(1.0), one((1 + step) ** 2, dtype="bfloat16"))

    assert found.first is not None
    assert found.first.ulps == pytest.approx(1 / (1 + step))
    assert (eps("float32"), eps("bfloat16"), eps("float8_e4m3fn"), eps("int64")) == (
        2**-23,
        2**-7,
        2**-3,
        None,
    )
    assert coarser("float32", "float16") == coarser("float16", "float32") == "float16"


def test_only_steps_that_both_measured_are_compared() -> None:
    """Runs that sample other steps are compared in those that both have."""
    a, b = story(steps=[0, 3, 7, 20]), story(steps=[0, 7, 9, 20, 31])

    assert compare(a, b).steps.tolist() == [0, 7, 20]


def test_light_rows_are_common_where_steps_in_full_are_not() -> None:
    """Norms are written in every step, so they are compared in more steps than the rest."""
    a, b = (
        story(steps=range(6), light=frozenset({1, 2, 3, 4})),
        story(steps=range(6), light=frozenset({1, 2, 4, 5})),
    )
    found = compare(a, b)
    norm = next(i for i, same in enumerate(found.alignment.sites) if same.kind == "grad.norm")
    out = next(i for i, same in enumerate(found.alignment.sites) if same.kind == "out")

    assert (found.steps.tolist(), found.full) == ([0, 1, 2, 3, 4, 5], 1)
    assert np.isnan(found.apart[out]).tolist() == [False] + [True] * 5
    assert not np.isnan(found.apart[norm]).any()


def test_a_gradient_on_schedule_is_not_compared_with_one_off_schedule() -> None:
    """Off schedule a parameter's gradient is seen only where one is not finite."""
    full, light = (
        one(4.0, 4.0, kind="param.grad", level=level, path="w") for level in (FULL, LIGHT)
    )
    other = Recording.build(
        full.sites, [{"step": 0, "site": 0, "count": 1, "sumsq": 1.0, "level": LIGHT}]
    )

    assert compare(full, full).steps.tolist() == compare(light, light).steps.tolist() == [0, 1]
    with pytest.raises(CannotCompare):
        compare(full, light)
    with pytest.raises(CannotCompare):
        compare(full, other)


def test_a_full_step_and_a_light_one_are_compared_up_to_rounding() -> None:
    """The same values, added up in another order, are no difference; more is, and so is one bit in steps of one kind."""
    full, light = one(4.0, 4.0), one(4.0 * (1 + 2**-20), 4.0, level=LIGHT)

    found = compare(full, light)
    assert (found.first, found.unlike, found.full) == (None, 2, 0)
    assert (
        "those of 2 steps that one alone measured in full up to rounding"
        in judge(found).cause.evidence
    )
    assert compare(full, one(4.0 * (1 + 2**-20), 4.0)).first is not None
    assert compare(one(4.0, 4.0, level=LIGHT), light).first is not None
    apart = compare(full, one(4.0, 4.01, level=LIGHT)).first
    assert apart is not None
    assert apart.step == 1


def test_updates_of_other_elements_are_not_compared() -> None:
    """An update is that of some elements; where their number differs they are other ones, and no difference is made up."""
    rows = [{"step": i, "site": 0, "count": n, "sumsq": 4.0 * n} for i, n in enumerate((8, 8))]
    other = [{"step": i, "site": 0, "count": n, "sumsq": 1.0 * n} for i, n in enumerate((6, 8))]
    a, b = (Recording.build([{"site": "w:update", "path": "w"}], given) for given in (rows, other))

    assert compare(a, b).steps.tolist() == [1]


def test_no_step_in_common_says_what_to_do() -> None:
    """The message names the steps of both and the options that make them the same."""
    with pytest.raises(CannotCompare) as raised:
        compare(story(steps=[0, 2, 4, 6]), story(steps=[1]))

    assert str(raised.value) == (
        "cannot compare a recording with a recording: no step was measured in both (a recording has steps 0, 2, 4 and "
        "others, a recording has step 1); record both again with --every 1 --budget none"
    )


def test_no_site_in_common_says_so() -> None:
    """Recordings of unlike models are not compared."""
    with pytest.raises(CannotCompare, match="no site of one could be found in the other"):
        compare(story(), Recording.build(["Other:out"], [{"step": 0, "site": 0}]))


def test_ranks_and_batches_are_merged_before_they_are_compared() -> None:
    """A step written in pieces is compared as a whole."""
    row = {"site": "fc:out", "sum": 0.0, "min": 0.0, "max": 0.0}
    whole = Recording.build(["fc:out"], [{**row, "step": 0, "count": 4, "sumsq": 4.0}])
    pieces = Recording.build(
        ["fc:out"], [{**row, "step": 0, "count": 2, "sumsq": s} for s in (1.0, 3.0)]
    )

    assert compare(whole, pieces).first is None


factors = st.dictionaries(
    st.sampled_from([f"{layer.path}:out" for layer in NET]),
    st.floats(0.01, 100.0),
    max_size=len(NET),
)


def _scaled(by: dict[str, float]) -> Recording:
    return story(factor=lambda text, step: by.get(text, 1.0))


@few
@given(factors)
def test_no_recording_differs_from_itself(by: dict[str, float]) -> None:
    """For all recordings: the difference from itself is empty."""
    found = compare(_scaled(by), _scaled(by))

    assert found.first is None
    assert not found.apart.any()
    assert not log_ratios(found).any()


@few
@given(factors, factors)
def test_the_difference_has_a_sign_and_a_size(a: dict[str, float], b: dict[str, float]) -> None:
    """For all pairs: exchanging the two changes the sign of every ratio, and no distance."""
    there, back = compare(_scaled(a), _scaled(b)), compare(_scaled(b), _scaled(a))

    assert np.array_equal(log_ratios(there), -log_ratios(back))
    assert np.array_equal(there.apart, back.apart)


def test_ratios_at_the_ends_of_the_scale() -> None:
    """Zero beside something is infinite, both zero is none, and what is not finite has no ratio."""
    a, b = one(4.0, 0.0, 1.0, 0.0, NAN), one(1.0, 0.0, 0.0, 1.0, 1.0)

    assert str(log_ratios(compare(a, b)).tolist()) == "[[-1.0, 0.0, -inf, inf, nan]]"
