"""NO-EFFECT: steps that change nothing, and learning rates of zero."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.rules.parameters.no_effect import NoEffect
from kedge.rules.registry import check
from kedge.rules.rule import Finding
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, steady

ADAM = {"index": 0, "type": "Adam", "roots": [0], "rates": [0.001], "steps": 300}


def rates(*changes: tuple[int, float | None]) -> list[dict[str, Any]]:
    """Describe an Adam, and its learning rate from some steps on."""
    noted = [
        {"kind": "learning-rates", "step": step, "optimizer": 0, "rates": [rate]}
        for step, rate in changes
    ]
    return [{"kind": "optimizers", "optimizers": [ADAM]}, *noted]


def course(*updates: float, events: list[dict[str, Any]] | None = None) -> Course:
    """Make weights of size 0.1 that get gradients, with these updates from sample 10 on."""
    made = Course(SAMPLES)
    for i, update in enumerate(updates):

        def figures(sample: int, update: float = update) -> tuple[float, float, float, float]:
            return (0.1, 1e-3, 1e-4 if sample < 10 else update, 1e-3)

        made.weight(f"l{i}", figures)
    made.events = rates((0, 0.001)) if events is None else events
    return made


def found(made: Course) -> list[Finding]:
    """Run the rule."""
    return list(NoEffect().check(made.recording()))


def test_steps_that_change_nothing_are_an_error():
    """The message says from which step on, and by which optimizer."""
    (finding,) = found(course(0.0, 0.0))

    assert (finding.severity, finding.site, finding.step) == ("error", "l0.weight:update", 100)
    assert finding.message == (
        "The last 20 measured steps of Adam with a learning rate of 0.001, from step 100 on, did not "
        "change any parameter of Net that gets a gradient, though there were gradients and the "
        "learning rate was not zero."
    )


def test_a_parameter_that_stays_what_it_was_is_a_warning():
    """The others change, so the step itself is carried out."""
    (finding,) = found(course(1e-4, 0.0, 1e-4))

    assert (finding.severity, finding.evidence.parameters) == ("warning", ["l1.weight"])
    assert finding.evidence.of == 3


def test_what_is_rounded_away_is_told_so():
    """In bfloat16 the remedy is another one."""
    made = Course(SAMPLES)
    made.weight("fc", steady(0.1, 1e-3, 0.0), dtype="bfloat16")
    made.events = rates((0, 0.001))

    (finding,) = found(made)

    assert "float32 master weights" in finding.remedy


def test_its_consequences_are_hints():
    """A weight that does not change has a small update ratio, too."""
    made = Course(SAMPLES)
    made.weight("fc", steady(0.1, 1e-3, 0.0))
    made.events = rates((0, 0.001))

    told = {finding.code: finding for finding in check(made.recording())}

    assert told["NO-EFFECT"].severity == "error"
    assert (told["UPDATE-RATIO"].severity, told["UPDATE-RATIO"].follows) == ("info", "NO-EFFECT")


@pytest.mark.parametrize("change", [1e-4, 1e-12])
def test_small_changes_are_no_finding(change):
    """However small they are: UPDATE-RATIO judges that."""
    assert found(course(change, change)) == []


@pytest.mark.parametrize("last", [0.001, None])
def test_nothing_is_said_without_the_rates(last):
    """An optimizer whose rate is not known, as on a device, may have a rate of zero."""
    told = found(course(0.0, events=rates((0, None))))
    assert told == []
    assert len(found(course(0.0, events=rates((0, last), (100, 0.001))))) == 1


def test_what_hardly_gets_a_gradient_may_stay_what_it_was():
    """What a bias before a batch norm gets is rounding."""
    made = course(1e-4)
    made.weight("bias", steady(0.1, 1e-9, 0.0))

    assert found(made) == []


@pytest.mark.parametrize("pull", [1e-3, 1e-7])
def test_what_has_arrived_at_its_lowest_loss_may_stay_there(pull):
    """Its gradient has become rounding, unlike that of a step which is not carried out."""
    made = Course(SAMPLES)
    made.weight("fc", lambda sample: (0.1, *((1e-3, 1e-4) if sample < 10 else (pull, 0.0)), 1e-3))
    made.events = rates((0, 0.001))

    assert bool(found(made)) == (pull == 1e-3)


def test_nine_steps_are_too_few():
    """A scaler skips some steps, and a few are lost in rounding."""
    made = Course(SAMPLES)
    made.weight("fc", lambda sample: (0.1, 1e-3, 1e-4 if sample < 21 else 0.0, 1e-3))
    made.events = rates((0, 0.001))

    assert found(made) == []


def test_a_schedule_that_has_reached_zero_long_ago_is_a_warning():
    """The rest of the run changes nothing."""
    (finding,) = found(course(0.0, events=rates((0, 0.001), (100, 0.0))))

    assert (finding.severity, finding.step) == ("warning", 100)
    assert finding.message == (
        "The learning rate of every parameter of Net has been zero since step 100, in the last 20 of "
        "30 measured steps: these changed nothing."
    )


def test_a_schedule_that_has_faded_long_ago_is_named_as_such():
    """Its rate is not zero, but rounding takes every update; the optimizer's step is carried out."""
    (finding,) = found(course(0.0, events=rates((0, 0.001), (100, 1e-13))))

    assert (finding.severity, finding.step) == ("warning", 100)
    assert "has fallen from 0.001 to 1e-13, and since step 100 every update" in finding.message
    assert "schedule" in finding.remedy


def test_a_schedule_that_ends_at_zero_is_no_finding():
    """That is what many do."""
    made = course(1e-4, events=rates(*((step, 1e-3 * (1 - step / 290)) for step in SAMPLES)))

    assert found(made) == []


@golden("NO-EFFECT", lacks=(1, 10))
def golden_no_effect(*, fires: bool) -> Golden:
    """Leave one of two weights what it was in the last ten steps, or change it a little."""
    made = Course(SAMPLES[:14])
    made.weight("fc", lambda sample: (0.1, 1e-3, 1e-4 if sample < 4 or not fires else 0.0, 1e-3))
    made.weight("head", steady(0.1, 1e-3, 1e-4))
    made.roots[0]["trained"] = True
    made.events = rates((0, 0.001))
    return written(made)
