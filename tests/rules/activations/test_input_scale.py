"""INPUT-SCALE: inputs that are far too large or too small for the first layer."""

from __future__ import annotations

import pytest

from kedge.rules.activations.input_scale import InputScale
from kedge.rules.rule import Finding
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, size, steady


def fed(
    inner: float,
    outer: float,
    returned: float,
    gradient: float,
    *,
    steps: int = 4,
    dtype: str = "float32",
) -> list[Finding]:
    """Judge a model that is given inputs of one size, and hands them to its first layer in another."""
    made = Course(range(steps))
    made.sites += [
        {"site": ":in", "dtype": dtype},
        {"site": "fc:in", "type": "Linear", "dtype": dtype},
    ]
    made.weight("fc", steady(0.1, gradient, 1e-4), out=returned)
    made.weight("head", steady(0.1, 1e-4, 1e-4), out=0.5)
    made.sites.append({"site": ":out", "type": "Net"})
    for step in made.steps:
        made.rows += [size(step, ":in", outer), size(step, "fc:in", inner)]
    return list(InputScale().check(made.recording()))


def test_inputs_that_are_not_scaled_are_a_warning():
    """With what they do to the first layer."""
    (finding,) = fed(85.0, 85.0, 40.0, 1e-2)

    assert (finding.severity, finding.site) == ("warning", "fc:in")
    assert finding.message == (
        "The input of the first layer of Net, fc:in, has an rms of 85, but layers are initialised for about 1: it returns 40, and "
        "its relative gradient is 1e+02 times the others'."
    )


@pytest.mark.parametrize(
    ("figures", "number"),
    [
        ((85.0, 85.0, 40.0, 1e-4), 1),
        ((85.0, 85.0, 0.5, 1e-2), 1),
        ((85.0, 85.0, 0.5, 1e-4), 0),
        ((49.0, 49.0, 40.0, 1e-2), 0),
        ((0.3, 85.0, 0.5, 1e-4), 0),
        ((85.0, 0.3, 40.0, 1e-2), 0),
    ],
    ids=["output", "gradient", "no effect", "not so large", "scaled inside", "made inside"],
)
def test_a_large_input_has_to_show(figures, number):
    """In the output or the gradient of the first layer; what the model scales itself is well."""
    assert len(fed(*figures)) == number


def test_inputs_that_become_large_are_not_the_data():
    """What an encoder returns grows with its weights."""
    made = Course(range(6))
    made.sites += [{"site": ":in"}, {"site": "fc:in", "type": "Linear"}]
    made.weight("fc", steady(0.1, 1e-2, 1e-4), out=40.0)
    made.rows += [
        size(step, site, 85.0 if step else 0.3) for step in made.steps for site in (":in", "fc:in")
    ]

    assert list(InputScale().check(made.recording())) == []


@pytest.mark.parametrize(
    ("inner", "outer", "number"),
    [(7e-6, 7e-6, 1), (3e-3, 3e-3, 0), (0.0, 0.0, 0), (7e-6, 1.0, 0), (1.0, 7e-6, 0)],
)
def test_inputs_of_next_to_nothing_are_a_warning(inner, outer, number):
    """Pixels divided by 255 three times; not sparse features, zeros, or what the model scales itself."""
    findings = fed(inner, outer, 0.1, 1e-4)

    assert len(findings) == number
    assert all(
        "rms of 7e-06, but layers are initialised for about 1: so small has no effect beside its biases"
        in f.message
        for f in findings
    )


def test_indices_and_short_runs_are_not_judged():
    """Whole numbers are looked up; three measured steps are asked for."""
    assert fed(85.0, 85.0, 40.0, 1e-2, dtype="int64") == []
    assert fed(85.0, 85.0, 40.0, 1e-2, steps=2) == []


@golden("INPUT-SCALE", lacks=(1, 3))
def golden_input_scale(*, fires: bool) -> Golden:
    """Feed pixels from 0 to 255, or the same divided by that."""
    course = Course(SAMPLES[:4])
    course.sites.append({"site": "fc:in", "type": "Linear"})
    course.weight("fc", steady(0.1, 1e-2 if fires else 1e-4, 1e-4), out=40.0 if fires else 0.5)
    course.weight("head", steady(0.1, 1e-4, 1e-4), out=0.5)
    course.rows += [size(step, "fc:in", 85.0 if fires else 0.33) for step in course.steps]
    return written(course)
