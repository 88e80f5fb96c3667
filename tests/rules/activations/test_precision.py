"""NEAR-OVERFLOW and UNDERFLOW: the ends of a number format, in the site's own dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from kedge.rules.activations.near_overflow import NearOverflow
from kedge.rules.activations.underflow import Underflow
from kedge.rules.rule import Finding
from kedge.store.recording import Recording
from tests.rules.goldens import Golden, golden
from tests.rules.scenes import histogram, size

HALF = 65504.0


def near(
    highest: Sequence[float],
    *,
    site: str = "fc:out",
    lowest: Sequence[float] | None = None,
    **entry: Any,
) -> list[Finding]:
    """Run NEAR-OVERFLOW over the extremes of one site."""
    low = lowest or [-1.0 - 0.1 * i for i in range(len(highest))]
    rows = [
        size(10 * i, site, 1.0) | {"min": small, "max": large}
        for i, (small, large) in enumerate(zip(low, highest, strict=True))
    ]
    recording = Recording.build([{"site": site, "dtype": "float16", **entry}], rows)
    return list(NearOverflow().check(recording))


def test_values_within_two_doublings_of_the_end_are_reported():
    """With the largest of them, the dtype and its end, and the step in which it began."""
    (finding,) = near([100.0, 17000.0, 20000.0, 30000.0])

    assert (finding.severity, finding.site, finding.step) == ("warning", "fc:out", 10)
    assert (
        finding.message
        == "fc:out reaches 3e+04; the largest float16 is 6.55e+04 (first close to it at step 10)."
    )
    assert finding.evidence.headroom == pytest.approx(math.log2(HALF / 30000), rel=1e-4)
    assert finding.evidence.course == [100.0, 17000.0, 20000.0, 30000.0]
    assert finding.evidence.steps == [0, 10, 20, 30]


@pytest.mark.parametrize(
    ("factor", "number"), [(0.249, 0), (0.251, 1)], ids=["more than two doublings", "less than two"]
)
def test_two_doublings_are_the_border(factor, number):
    """A quarter of the largest number is as near as it may come."""
    assert len(near([HALF * factor + i for i in range(5)])) == number


def test_the_headroom_is_counted_in_doublings():
    """Three of them are a factor of eight."""
    rows = [size(i, "fc:out", 1.0) | {"min": 0.0, "max": HALF * 0.13 + i} for i in range(3)]
    recording = Recording.build([{"site": "fc:out", "dtype": "float16"}], rows)

    (finding,) = NearOverflow(headroom=3).check(recording)

    assert finding.step == 0
    assert list(NearOverflow(headroom=2).check(recording)) == []


def test_large_negative_values_count():
    """The format ends on both sides."""
    assert len(near([1.0, 1.1, 1.2], lowest=[-20000.0, -21000.0, -22000.0])) == 1


@pytest.mark.parametrize(
    ("dtype", "number"), [("float16", 1), ("bfloat16", 0), ("float32", 0), ("int64", 0)]
)
def test_the_dtype_of_the_site_counts(dtype, number):
    """What is much for float16 is little for formats with the range of float32; whole numbers have no such end."""
    assert len(near([20000.0, 21000.0, 22000.0], dtype=dtype)) == number


def test_float32_has_an_end_too():
    """It is far away, and the same rule holds."""
    assert len(near([2e38, 2.1e38, 2.2e38], dtype="float32")) == 1


def test_two_samples_are_left_to_the_eye():
    """Three measured steps are asked for."""
    assert near([20000.0, 30000.0, 5.0, 6.0]) == []
    assert len(near([20000.0, 30000.0, 5.0, 40000.0])) == 1


def test_a_value_that_is_written_in_the_program_is_none_that_grew():
    """A mask has the same lowest value in every step."""
    assert near([1.0, 2.0, 3.0], lowest=[-HALF] * 3) == []
    assert len(near([20000.0, 21000.0, 22000.0], lowest=[-HALF] * 3)) == 1


@pytest.mark.parametrize(
    ("site", "dtype", "number"),
    [("fc:out.grad", "float16", 0), ("fc:out.grad", "float32", 1), ("fc:in", "float16", 1)],
)
def test_gradients_in_half_formats_are_driven_there_on_purpose(site, dtype, number):
    """Loss scaling raises its factor until something overflows."""
    high = 20000.0 if dtype == "float16" else 2e38
    assert len(near([high, high * 1.1, high * 1.2], site=site, dtype=dtype)) == number


def test_steps_that_are_not_finite_are_left_out():
    """They are another rule's, and what came before is judged all the same."""
    (finding,) = near([20000.0, 21000.0, 22000.0, math.inf, math.nan])

    assert finding.evidence.largest == 22000.0


def test_the_first_of_the_flow_speaks_for_those_after_it():
    """What is large at one module is so at the next ones; sites of another root speak for themselves."""
    names = ["a:out", "b:out", "G.a:out"]
    rows = [
        size(i, name, 1.0) | {"min": 0.0, "max": 20000.0 + i} for i in range(3) for name in names
    ]
    sites = [{"site": name, "dtype": "float16", "root": int("G" in name)} for name in names]

    first, other = NearOverflow().check(Recording.build(sites, rows))

    assert (first.site, first.evidence.sites) == ("a:out", ["a:out", "b:out"])
    assert first.message.endswith("(first close to it at step 0); also close: 1 more site.")
    assert (other.site, other.evidence.sites) == ("G.a:out", ["G.a:out"])


def under(
    *small: int,
    steps: int = 12,
    dtype: str = "float16",
    power: int = -16,
    kind: str = "out.grad",
    **columns: Any,
) -> list[Finding]:
    """Run UNDERFLOW over gradients of which so many percent have this power of two."""
    names = [f"l{i}:{kind}" for i in range(len(small))]
    rows = [
        size(step, name, 1e-3)
        | {"exponents": histogram({power: percent, -5: 100 - percent})}
        | columns
        for step in range(steps)
        for name, percent in zip(names, small, strict=True)
    ]
    recording = Recording.build([{"site": name, "dtype": dtype} for name in names], rows)
    return list(Underflow().check(recording))


def test_gradients_that_lose_digits_are_reported():
    """The worst is named, and how many of the gradients are concerned."""
    (finding,) = under(30, 2, 60)

    assert (finding.severity, finding.site, finding.step) == ("warning", "l2:out.grad", -1)
    assert finding.message == (
        "60% of the non-zero elements of l2:out.grad are below 6.1e-05, where float16 loses digits. "
        "In 2 of the 3 float16 gradients of the model more than 5% are."
    )
    assert finding.evidence.shares == {"l2:out.grad": 0.6, "l0:out.grad": 0.3}
    assert "GradScaler" in finding.remedy


@pytest.mark.parametrize(("percent", "number"), [(5, 0), (6, 1)])
def test_one_in_twenty_is_the_border(percent, number):
    """The share has to be exceeded."""
    assert len(under(percent, percent)) == number


@pytest.mark.parametrize(("power", "number"), [(-14, 0), (-15, 1), (-60, 1)])
def test_the_smallest_normal_number_is_the_border(power, number):
    """2^-14 itself has all its digits."""
    assert len(under(20, 20, power=power)) == number


@pytest.mark.parametrize(
    ("shares", "number"),
    [((50,), 0), ((50, 50), 1), ((50, 50, 0, 0), 1), ((50, 50, 0, 0, 0), 0)],
    ids=["one", "two of two", "two of four", "two of five"],
)
def test_half_of_the_gradients_decide_and_two_at_least(shares, number):
    """The logits of a confident model get tiny gradients, and nothing is lost with them."""
    assert len(under(*shares)) == number


@pytest.mark.parametrize(
    ("dtype", "power", "number"),
    [
        ("bfloat16", -60, 0),
        ("float32", -60, 0),
        ("bfloat16", -140, 1),
        ("float64", -140, 0),
        ("int64", -140, 0),
    ],
)
def test_the_dtype_of_the_gradient_counts(dtype, power, number):
    """Formats with the range of float32 end at 2^-126, those of float64 beyond what can be told apart."""
    assert len(under(50, 50, dtype=dtype, power=power)) == number


def test_no_scale_is_advised_where_none_helps():
    """A gradient below 2^-126 vanished on its way."""
    (finding,) = under(50, 50, dtype="float32", power=-140)

    assert "GRAD-VANISH" in finding.remedy


def test_activations_are_not_judged():
    """What softmax makes tiny may be taken for zero."""
    assert under(50, 50, kind="out") == []
    assert len(under(50, 50, kind="param.grad")) == 1


def test_a_few_samples_are_no_median():
    """Ten are asked for, and steps that are not finite are none."""
    assert under(50, 50, steps=9) == []
    assert len(under(50, 50, steps=10)) == 1
    assert under(50, 50, steps=12, nonfinite=1) == []


def test_only_the_end_of_the_run_is_judged():
    """A scaler that starts too low finds its factor."""
    names = ["a:out.grad", "b:out.grad"]
    rows = [
        size(step, name, 1e-3) | {"exponents": histogram({-16: 50 if step < 70 else 1, -5: 50})}
        for step in range(110)
        for name in names
    ]
    sites = [{"site": name, "dtype": "float16"} for name in names]

    assert list(Underflow().check(Recording.build(sites, rows))) == []


def test_each_dtype_and_root_is_judged_by_itself():
    """Gradients that are float32 do not vote for those in float16."""
    names = ["a:out.grad", "b:out.grad", "c:param.grad", "d:param.grad", "e:param.grad"]
    rows = [
        size(step, name, 1e-3) | {"exponents": histogram({-16: 50, -5: 50})}
        for step in range(12)
        for name in names
    ]
    sites = [{"site": name, "dtype": "float16" if "out" in name else "float32"} for name in names]

    (finding,) = Underflow().check(Recording.build(sites, rows))

    assert (finding.evidence.concerned, finding.evidence.gradients) == (2, 2)


def with_loss(*losses: list[float]) -> list[Finding]:
    """Run UNDERFLOW over gradients that lose digits, beside losses with one value a step."""
    names = ["a:out.grad", "b:out.grad"]
    sites: list[dict[str, Any]] = [{"site": name, "dtype": "float16"} for name in names]
    rows = [
        size(step, name, 1e-3) | {"exponents": histogram({-16: 50, -5: 50})}
        for step in range(len(losses[0]))
        for name in names
    ]
    for i, values in enumerate(losses):
        name = f"loss_{i}"
        sites.append(
            {"site": name, "path": name, "kind": "loss", "type": "", "root": -1, "shape": []}
        )
        rows += [
            {"step": step, "site": name, "count": 1, "sum": value, "sumsq": value * value}
            for step, value in enumerate(values)
        ]
    return list(Underflow().check(Recording.build(sites, rows)))


@pytest.mark.parametrize(("rest", "number"), [(0.0099, 0), (0.01, 1), (0.5, 1)])
def test_a_loss_that_has_fallen_to_a_hundredth_was_not_held_up(rest, number):
    """Its small gradients are left out: of 29 steps only nine are above a hundredth of the first values."""
    assert len(with_loss([1.0] * 9 + [rest] * 20)) == number


@pytest.mark.parametrize(("above", "number"), [(9, 0), (10, 1)])
def test_the_steps_before_the_loss_fell_are_judged(above, number):
    """If there are enough of them for a median."""
    assert len(with_loss([1.0] * above + [1e-3] * 20)) == number


def test_a_second_loss_that_has_not_fallen_keeps_the_finding():
    """There is something left to learn."""
    assert len(with_loss([1.0] * 5 + [1e-3] * 25, [1.0] * 30)) == 1


def test_a_loss_below_zero_has_not_fallen_to_a_share_of_itself():
    """A log-likelihood crosses zero, and its size says nothing."""
    assert len(with_loss([1.0] * 5 + [-1e-3] * 25)) == 1


@golden("NEAR-OVERFLOW", lacks=(1, 3))
def golden_near_overflow(*, fires: bool) -> Golden:
    """Make a float16 activation reach half of 65,504, or stay three doublings below it."""
    rows = [
        size(step, "fc:out", 100.0) | {"min": -9.0, "max": (3e4 if fires else 8e3) + step}
        for step in range(0, 50, 10)
    ]
    return {"roots": [], "sites": [{"site": "fc:out", "dtype": "float16"}], "rows": rows}


@golden("UNDERFLOW", lacks=(0, 10))
def golden_underflow(*, fires: bool) -> Golden:
    """Put a tenth of float16 gradients below 2^-14, or a hundredth."""
    names = ["fc:out.grad", "head:out.grad"]
    drawn = histogram({-16: 10, -10: 90} if fires else {-16: 1, -10: 99})
    rows = [size(step, name, 1e-3) | {"exponents": drawn} for step in range(12) for name in names]
    return {
        "roots": [],
        "sites": [{"site": name, "dtype": "float16"} for name in names],
        "rows": rows,
    }
