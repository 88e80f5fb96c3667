"""NO-LEARNING, and which losses rules speak of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from kedge.rules.recorded.losses import losses
from kedge.rules.rule import Finding
from kedge.rules.training.no_learning import NoLearning
from tests.rules.goldens import Golden, golden, written
from tests.rules.scenes import Course, Figures, steady

NOISE = (0.3, -0.2, 0.5, -0.4, 0.1, -0.5, 0.4, -0.1, 0.2, -0.3)


def noisy(values: Sequence[float], noise: float = 0.1) -> list[float]:
    """Add noise that repeats."""
    return [value + noise * NOISE[i % len(NOISE)] for i, value in enumerate(values)]


def trained(*courses: Sequence[float], classes: int = 0, **entry: object) -> list[Finding]:
    """Judge a model that is trained on losses."""
    made = Course(range(0, 100, 10))
    made.weight("fc", steady(0.1, 1e-3, 1e-4))
    for i, values in enumerate(courses):
        made.loss(values, **({"site": f"loss_{i + 1}"} if i else {}), **entry)
    if classes:
        made.sites.append({"site": ":out", "type": "Net", "shape": [32, classes]})
    return list(NoLearning().check(made.recording()))


def test_a_loss_that_stays_the_same_is_found():
    """Both ends and the noise."""
    (finding,) = trained(noisy([2.3] * 60))

    assert (finding.severity, finding.site, finding.step) == ("info", "loss", 59)
    assert "began at 2.31 and ended at" in finding.message


def judged(figures: Figures, *events: dict[str, Any]) -> Finding:
    """Return the finding of a model with such weights whose loss stays the same."""
    made = Course(range(0, 1000, 40))
    made.weight("fc", figures)
    made.weight("head", figures)
    made.loss(noisy([2.3] * 60))
    made.events = list(events)
    (finding,) = NoLearning().check(made.recording())
    return finding


def test_steps_that_hardly_move_the_weights_are_named():
    """With the learning rate, and with what all steps add up to."""
    optimizer = {"index": 0, "type": "SGD", "steps": 1000, "roots": [0], "rates": [1e-6]}
    event = {"kind": "optimizers", "optimizers": [optimizer]}

    finding = judged(steady(0.1, 1e-3, 3e-7), event)

    assert finding.message.endswith(
        "What may be the cause: the changes of the usual weight add up to 0.3 % of its size over "
        "all steps."
    )
    assert finding.remedy.startswith("Raise the learning rate (SGD with a learning rate of 1e-06).")
    assert finding.evidence.reach == pytest.approx(0.00288, rel=0.01)


def test_steps_that_move_the_weights_far_enough_are_not_named():
    """Their learning rate may still be wrong, but nothing shows that."""
    finding = judged(steady(0.1, 1e-3, 3e-6))

    assert "may be the cause" not in finding.message
    assert "labels belong to their inputs" in finding.remedy
    assert "reach" not in finding.entry()["evidence"]


def test_a_frozen_model_and_equal_inputs_are_named():
    """Each with its figure; neither is sure to be the cause."""
    frozen = {"kind": "frozen", "step": 0, "root": 0, "frozen": 90, "elements": 100}
    same = {"kind": "repeated-inputs", "step": 0, "root": 0, "compared": 30, "batch": 8}

    finding = judged(steady(0.1, 1e-3, 1e-4), frozen, same)

    assert finding.message.endswith(
        "What may be the cause: 90.0 % of the model is frozen; the inputs were the same in all 30 "
        "measured steps that were compared."
    )
    assert (finding.evidence.frozen, finding.evidence.same_inputs) == (0.9, 30)


def test_of_a_loss_that_was_not_recorded_to_the_end_nothing_is_said_about_the_end():
    """A loaded machine leaves out steps; the message says where the record stops."""
    made = Course(range(0, 100, 10))
    made.weight("fc", steady(0.1, 1e-3, 1e-4))
    made.loss(noisy([2.3] * 60))
    made.events.append({"kind": "end", "step": 299, "steps": 300})

    (finding,) = NoLearning().check(made.recording())

    assert "ended" not in finding.message
    assert "by step 59, the last of 300 steps in which it was recorded" in finding.message


def test_a_loss_that_rises_is_found():
    """It did not fall either."""
    assert len(trained(noisy([2.3 + 0.1 * i for i in range(60)]))) == 1


@pytest.mark.parametrize(
    "values",
    [
        noisy([2.3 - 0.02 * i for i in range(60)]),
        [2.3, *noisy([0.5] * 59)],
        [*noisy([2.3, 2.0, 1.0]), *noisy([0.5] * 57)],
        noisy([2.3 - 0.005 * i for i in range(60)]),
        noisy([2.0] * 5 + [2.5 - 0.007 * i for i in range(55)]),
    ],
    ids=["steadily", "at once", "in three steps", "slowly", "after a few easy batches"],
)
def test_a_loss_that_falls_is_no_finding(values):
    """Slowly or at once."""
    assert trained(values) == []


@pytest.mark.parametrize(("number", "findings"), [(49, 0), (50, 1)])
def test_fifty_losses_are_asked_for(number, findings):
    """Fewer show little but noise."""
    assert len(trained(noisy([2.3] * number))) == findings


def test_a_fall_within_its_noise_is_no_learning():
    """Three standard errors are asked for."""
    assert len(trained(noisy([2.3 - 0.0002 * i for i in range(60)], 0.4))) == 1


@pytest.mark.parametrize(
    "values",
    [noisy([0.0] * 60), [*noisy([2.3] * 59), math.nan]],
    ids=["crosses zero", "ends as NaN"],
)
def test_what_other_rules_or_none_can_judge_is_left_alone(values):
    """A policy's gradient; a run that broke."""
    assert trained(values) == []


@pytest.mark.parametrize(("ascends", "number"), [(False, 1), (True, 0)])
def test_a_loss_that_the_program_makes_large_is_not_to_fall(ascends, number):
    """Its backward begins with -1."""
    made = Course(range(0, 100, 10))
    made.weight("fc", steady(0.1, 1e-3, 1e-4))
    made.loss(noisy([2.3 + i / 60 for i in range(60)]))
    made.events = [{"kind": "loss-graph", "step": 0, "site": "loss", "ascends": ascends}]

    assert len(list(NoLearning().check(made.recording()))) == number


def test_one_of_several_losses_is_enough():
    """Of a GAN one rises while the other falls."""
    still, falling = noisy([0.7] * 60), noisy([2.3 - 0.02 * i for i in range(60)])

    assert trained(still, falling) == []
    assert len(trained(still, still)) == 1


def test_a_model_that_falls_to_chance_has_learned_nothing():
    """The logarithm of the number of classes is what a constant answer comes to."""
    values = noisy([5.0 - 0.3 * min(i, 9) for i in range(60)], 0.01)

    assert trained(values) == []
    (finding,) = trained(values, classes=10, node="NllLossBackward0")
    assert "ended at 2.299" in finding.message
    assert "which is chance for 10 classes (log 10 = 2.3)" in finding.message
    assert trained(values, classes=20, node="MseLossBackward0") == []
    (finding,) = trained(values, classes=4, node="NllLossBackward0")
    assert "which is above chance for 4 classes (log 4 = 1.39)" in finding.message
    assert trained(values, classes=11, node="NllLossBackward0") == []


def test_without_training_there_is_nothing_to_learn():
    """As where a model is only evaluated."""
    made = Course(range(0, 100, 10))
    made.loss(noisy([2.3] * 60))

    assert list(NoLearning().check(made.recording())) == []
    assert NoLearning().lacking(made.recording()) is None


def test_the_loss_is_what_backward_began_at():
    """Where that is recorded a criterion's output is not taken for a second loss."""
    made = Course(range(3))
    made.sites.append({"site": ":out", "shape": []})
    made.rows += [{"step": step, "site": ":out", "count": 1, "sum": 1.0} for step in made.steps]
    assert [loss.site.site for loss in losses(made.recording())] == [":out"]

    made.loss([2.0, 1.0, 0.5])
    assert [loss.site.site for loss in losses(made.recording())] == ["loss"]


def test_steps_with_fewer_calls_than_usual_are_left_out():
    """The last one of a GAN holds one part of its losses; where most differ, all are kept."""
    made = Course(range(6))
    made.loss([1.0] * 6)
    made.rows = [row | {"calls": 3, "count": 3, "sum": 3.0} for row in made.rows]
    made.rows[-1] |= {"calls": 1, "count": 1, "sum": 9.0}
    assert losses(made.recording())[0].values.tolist() == [1.0] * 5

    for i, row in enumerate(made.rows):
        row["calls"] = i + 1
    assert len(losses(made.recording())[0].values) == 6


@golden("NO-LEARNING", lacks=(1, 50))
def golden_no_learning(*, fires: bool) -> Golden:
    """Make the loss swing around its first value, or fall below it."""
    course = Course(range(0, 60, 10))
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.loss([2.3 + 0.05 * (i * 7 % 5 - 2) - (0.0 if fires else 0.02 * i) for i in range(60)])
    return written(course)
