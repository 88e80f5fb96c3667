"""INIT-SCALE over the depth, SCALE-DRIFT over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kedge.rules.activations.init_scale import InitScale
from kedge.rules.activations.scale_drift import ScaleDrift
from kedge.rules.rule import Finding
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, steady

FIGURES = steady(0.1, 1e-3, 1e-4)


def at_start(
    scales: Sequence[float | Callable[[int], float]], steps: Sequence[int] = (0, 10), **entry: Any
) -> Course:
    """Make layers whose outputs have these sizes."""
    made = Course(steps)
    for i, scale in enumerate(scales):
        made.weight(f"l{i}", FIGURES, out=scale, **entry)
    return made


def init(made: Course) -> list[Finding]:
    """Run INIT-SCALE."""
    return list(InitScale().check(made.recording()))


def test_a_signal_that_grows_from_layer_to_layer_is_reported():
    """With the factor, both ends, and the profile."""
    (finding,) = init(at_start([4.0**i for i in range(6)]))

    assert (finding.severity, finding.site, finding.step) == ("warning", "l5:out", 0)
    assert finding.message == (
        "At step 0 the scale of the outputs of Net grows by a factor of 4 from layer to layer: "
        "from 1 at l0:out to 1e+03 at l5:out."
    )
    assert finding.evidence.doublings == 10.0
    assert finding.evidence.rank_correlation == 1.0
    assert finding.evidence.profile["l2:out"] == 16.0


def test_a_signal_that_shrinks_is_reported():
    """It dies away."""
    (finding,) = init(at_start([0.2**i for i in range(6)]))

    assert "shrinks by a factor of 5 from layer to layer" in finding.message
    assert finding.evidence.doublings == pytest.approx(-5 * math.log2(5), rel=1e-4)
    assert finding.evidence.factor == pytest.approx(0.2)


@pytest.mark.parametrize(("factor", "number"), [(2.9, 0), (3.1, 1), (1 / 2.9, 0), (1 / 3.1, 1)])
def test_six_doublings_are_the_border(factor, number):
    """Over five layers' worth of depth: a factor of 2.83 to the fourth."""
    assert (
        len(init(at_start([(factor ** (6 / 4 / math.log2(3))) ** i for i in range(5)]))) == number
    )


def test_the_ups_and_downs_of_a_transformer_are_no_trend():
    """Its layers differ by a factor of a hundred, and block after block in the same way."""
    assert init(at_start([1.0, 0.01, 0.5, 0.02] * 6)) == []


def test_a_trend_has_to_be_that_of_nearly_all_layers():
    """Ups and downs on the way are another thing."""
    assert init(at_start([1, 300, 2, 100, 1000, 5, 2000, 400.0])) == []


@pytest.mark.parametrize(("layers", "number"), [(3, 0), (4, 1)])
def test_a_shallow_model_has_no_trend(layers, number):
    """Four layers are asked for."""
    assert len(init(at_start([100.0**i for i in range(layers)]))) == number


def test_only_the_first_step_counts():
    """What training makes of it is for SCALE-DRIFT."""
    assert init(at_start([lambda n, i=i: 4.0**i if n else 1.0 for i in range(6)])) == []
    assert len(init(at_start([lambda n, i=i: 1.0 if n else 4.0**i for i in range(6)]))) == 1


@pytest.mark.parametrize(("first", "number"), [(10, 1), (11, 0)])
def test_a_recording_that_begins_later_shows_no_start(first, number):
    """After ten steps the initialisation is not to be seen any more."""
    assert len(init(at_start([4.0**i for i in range(6)], steps=(first, first + 10)))) == number


def test_outputs_that_are_zero_have_no_scale():
    """A branch that starts at zero is left out, and so are embeddings."""
    made = at_start([4.0, 0.0, 16.0, 64.0])
    made.weight("table", FIGURES, out=256.0, type="Embedding")

    assert init(made) == []


def test_roots_have_their_own_depth():
    """A generator and a critic are not one stack."""
    made = at_start([4.0, 16.0, 64.0])
    for i in range(3):
        made.weight(f"C.l{i}", FIGURES, out=256.0 * 4**i, root=1)

    assert init(made) == []


def drift(
    scale: Callable[[int], float], steps: Sequence[int] = range(0, 1000, 10), **entry: Any
) -> list[Finding]:
    """Run SCALE-DRIFT over one module."""
    made = Course(steps)
    made.weight("fc", FIGURES, out=scale, **entry)
    return list(ScaleDrift().check(made.recording()))


def test_a_scale_that_keeps_growing_is_reported():
    """With its speed, and both ends."""
    (finding,) = drift(lambda i: 2.0 ** (i / 10))

    assert (finding.severity, finding.site, finding.step) == ("warning", "fc:out", 500)
    assert finding.message == (
        "fc:out grew from 32 to 955 (rms) since step 500, 10 doublings per 1,000 steps, and has not levelled off."
    )
    assert finding.evidence.doublings == pytest.approx(4.9)
    assert finding.evidence.sites == {"fc:out": pytest.approx(10.0)}


def test_a_scale_that_keeps_shrinking_is_reported():
    """Until nothing is left."""
    (finding,) = drift(lambda i: 0.5 ** (i / 10))

    assert "fc:out shrank from 0.0312 to 0.00105" in finding.message


@pytest.mark.parametrize(
    "scale",
    [
        lambda i: 1.0,
        lambda i: 1 + 0.5 * math.sin(i),
        lambda i: 2.0 ** (10 * i / (i + 10)),
        lambda i: 1e3 if i < 50 else 1.0,
        lambda i: 2.0 ** min(i / 5, 12),
        lambda i: 2.0 ** min(i / 5, 16),
    ],
    ids=[
        "still",
        "noise",
        "growth that slows down",
        "a bad start",
        "comes to rest",
        "comes to rest late",
    ],
)
def test_what_healthy_runs_do_is_no_finding(scale):
    """They move most at the start, and less and less."""
    assert drift(scale) == []


@pytest.mark.parametrize("sign", [1, -1])
def test_a_steady_drift_may_be_noisy(sign):
    """The medians of eight parts keep to the line, whatever single steps do."""
    (finding,) = drift(lambda i: 2.0 ** (sign * (i / 10 + math.sin(2.4 * i))))

    assert finding.evidence.doublings_per_1000_steps == pytest.approx(sign * 10, rel=0.1)
    assert len(finding.evidence.course) == 6


@pytest.mark.parametrize(("bend", "number"), [(0.5, 1), (1.3, 0)])
def test_a_drift_that_bends_is_on_its_way_to_rest(bend, number):
    """Five doublings that leave their line by more than half of one."""
    assert (
        len(drift(lambda i: 2.0 ** (i / 10 + bend * math.sin(max(i - 50, 0) / 49 * math.pi))))
        == number
    )


@pytest.mark.parametrize(("doublings", "number"), [(2.9, 0), (3.1, 1)])
def test_three_doublings_within_half_a_run_are_the_border(doublings, number):
    """From the middle of the run to its end."""
    assert len(drift(lambda i: 2.0 ** (i * doublings / 49))) == number


@pytest.mark.parametrize(("speed", "number"), [(0.45, 0), (0.55, 1)])
def test_a_drift_over_very_many_steps_is_learning(speed, number):
    """Half a doubling in a thousand steps."""
    assert len(drift(lambda i: 2.0 ** (speed * i / 10), steps=range(0, 20000, 100))) == number


@pytest.mark.parametrize(("samples", "number"), [(18, 0), (19, 1)])
def test_a_few_samples_are_no_course(samples, number):
    """Ten in the second half are asked for."""
    assert len(drift(lambda i: 2.0**i, steps=range(0, 10 * samples, 10))) == number


def test_the_fastest_speaks_for_the_root():
    """The others are counted."""
    made = Course(range(0, 1000, 10))
    for i, speed in enumerate((10, 5, 1e9)):
        made.weight(f"l{i}", FIGURES, out=lambda n, s=speed: 2.0 ** (n / s))

    (finding,) = ScaleDrift().check(made.recording())

    assert finding.site == "l1:out"
    assert finding.message.endswith("has not levelled off; also drifting: 1 more module.")
    assert list(finding.evidence.sites) == ["l1:out", "l0:out"]


def test_embeddings_and_steps_that_are_not_finite_are_left_out():
    """They say nothing of a scale."""
    assert drift(lambda i: 2.0**i, type="Embedding") == []
    assert len(drift(lambda i: math.inf if i == 70 else 2.0 ** (i / 10))) == 1


@golden("INIT-SCALE")
def golden_init_scale(*, fires: bool) -> Golden:
    """Multiply the scale by four from layer to layer, or by a half."""
    course = Course(SAMPLES[:3])
    for i in range(6):
        course.weight(f"l{i}", steady(0.1, 1e-3, 1e-4), out=(4.0 if fires else 0.5) ** i)
    return written(course)


@golden("SCALE-DRIFT", lacks=(1, 19))
def golden_scale_drift(*, fires: bool) -> Golden:
    """Double an output every hundred steps without end, or bring it to rest."""
    course = Course(range(0, 600, 10))
    course.weight(
        "fc", steady(0.1, 1e-3, 1e-4), out=lambda i: 2.0 ** (i / 8 if fires else 6 * i / (i + 10))
    )
    return written(course)
