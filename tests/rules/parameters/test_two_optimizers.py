"""TWO-OPTIMIZERS: parameters that two optimizers change."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.rules.parameters.two_optimizers import TwoOptimizers
from kedge.rules.rule import Finding
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, steady

BOTH = [
    {"index": 0, "type": "Adam", "steps": 50, "roots": [0], "rates": [1e-3]},
    {"index": 1, "type": "SGD", "steps": 50, "roots": [0], "rates": [0.05, 0.05]},
]


def made(*events: dict[str, Any]) -> Course:
    """Make a healthy course with some events."""
    course = Course(SAMPLES[:5])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.roots[0]["trained"] = True
    course.events = [{"kind": "optimizers", "optimizers": BOTH}, *events]
    return course


def shared(**entry: Any) -> dict[str, Any]:
    """Describe two optimizers that hold one parameter."""
    event = {
        "kind": "shared-parameters",
        "optimizers": [0, 1],
        "parameters": ["fc.weight"],
        "count": 1,
        "compared": 8,
        "same": 8,
    }
    return {**event, **entry}


def found(**entry: Any) -> Finding:
    """Return the only finding of the rule."""
    (finding,) = TwoOptimizers().check(made(shared(**entry)).recording())
    return finding


def test_gradients_that_are_used_twice_are_a_warning():
    """Both optimizers are named, and what they share."""
    finding = found()

    assert (finding.severity, finding.site, finding.step) == ("warning", "fc.weight:param", -1)
    assert finding.message == (
        "Adam (optimizer 0, learning rate 0.001) and SGD (optimizer 1, learning rate 0.05) both hold 1 "
        "parameter of Net (fc.weight), and both step: in 8 of 8 measured steps in which both stepped, "
        "the second one used the gradients that the first one had used."
    )


@pytest.mark.parametrize(
    ("compared", "same", "severity"),
    [(8, 4, "warning"), (8, 3, "info"), (2, 2, "info"), (0, 0, "info")],
)
def test_gradients_of_their_own_are_a_hint(compared: int, same: int, severity: str):
    """A program may train a part of a model with two losses on purpose."""
    assert found(compared=compared, same=same).severity == severity


def test_it_is_said_that_the_gradients_were_others_where_all_were():
    """Not where that is not known."""
    assert "with other gradients in all 8 compared steps" in found(same=0).message
    assert "other gradients" not in found(compared=0, same=0).message
    assert "other gradients" not in found(same=2).message


def test_optimizers_of_nothing_that_is_watched_are_no_finding():
    """Their parameters have no names."""
    recording = made(shared(parameters=[])).recording()

    assert list(TwoOptimizers().check(recording)) == []


@golden("TWO-OPTIMIZERS", lacks=(0, 1))
def golden_two_optimizers(*, fires: bool) -> Golden:
    """Share a parameter, or do not."""
    events = []
    if fires:
        events.append(shared())
    return written(made(*events))
