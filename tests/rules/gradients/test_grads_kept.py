"""GRADS-KEPT: gradients of the step before that are still there."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.rules.gradients.grads_kept import GradsKept
from kedge.rules.rule import Finding
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, steady, trained


def found(*events: dict[str, Any], steps: range = range(12)) -> list[Finding]:
    """Run the rule over a trained model of two weights and some events."""
    return list(GradsKept().check(trained(*events, steps=steps)))


def kept(step: int, number: int = 4, **entry: Any) -> dict[str, Any]:
    """Describe gradients that were still there."""
    return {
        "kind": "grads-kept",
        "step": step,
        "optimizer": 0,
        "checked": 4,
        "kept": number,
        **entry,
    }


def test_kept_gradients_in_three_steps_in_a_row_are_an_error():
    """The first step and the number of parameters are named."""
    (finding,) = found(kept(3), kept(4), kept(5))

    assert (finding.severity, finding.site, finding.step) == ("error", "fc.weight:param.grad", 3)
    assert (
        "4 of 4 still had those of the step before in 3 measured steps in a row, from step 3 on"
        in finding.message
    )
    assert "each step of Adam follows the sum" in finding.message


@pytest.mark.parametrize(
    ("steps", "number"),
    [((3, 4), 0), ((3, 5, 7), 0), ((3, 4, 6, 7), 0), ((3, 4, 6, 7, 8), 1), ((1, 2, 3, 4), 1)],
)
def test_steps_with_a_measured_one_between_are_no_row(steps, number):
    """A step in which the gradients were cleared ends it."""
    assert len(found(*map(kept, steps))) == number


def test_steps_that_were_not_measured_do_not_break_a_row():
    """Of them nothing is known."""
    assert len(found(kept(20), kept(30), kept(40), steps=range(0, 100, 10))) == 1


@pytest.mark.parametrize(("number", "findings"), [(1, 0), (2, 1), (4, 1)])
def test_half_of_the_gradients_have_to_be_kept(number, findings):
    """A few that are not cleared on purpose are another thing."""
    assert len(found(*(kept(step, number) for step in (3, 4, 5)))) == findings


def test_optimizers_are_judged_one_by_one():
    """Two that kept theirs in turn are no row."""
    assert found(kept(3), kept(4, optimizer=1), kept(5), kept(6, optimizer=1)) == []


@golden("GRADS-KEPT", lacks=(1, 4))
def golden_grads_kept(*, fires: bool) -> Golden:
    """Keep the gradients in three measured steps in a row, or in two of them."""
    course = Course(SAMPLES[:6])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    kept = {"kind": "grads-kept", "optimizer": 0, "checked": 4, "kept": 4}
    course.events = [{**kept, "step": step} for step in (10, 20, 30 if fires else 50)]
    return written(course)
