"""UPDATE-RATIO: too large at the end, too small all the time."""

from __future__ import annotations

import itertools
import math

import pytest

from kedge.rules.parameters.update_ratio import UpdateRatio
from kedge.rules.rule import Finding
from tests.rules.goldens import Golden, golden, written
from tests.rules.scenes import Course, steady

SAMPLES = range(0, 600, 10)


def course(*updates: float, gradient: float = 1e-3) -> Course:
    """Make weights of size 0.1 with these updates."""
    made = Course(SAMPLES)
    for i, update in enumerate(updates):
        made.weight(f"l{i}", steady(0.1, gradient, update))
    return made


def found(made: Course) -> list[Finding]:
    """Run the rule."""
    return list(UpdateRatio().check(made.recording()))


@pytest.mark.parametrize("ratio", [1e-5, 1e-4, 1e-3, 1e-2, 0.09])
def test_what_healthy_runs_do_is_no_finding(ratio):
    """From careful fine-tuning to bold training."""
    assert found(course(*[0.1 * ratio] * 4)) == []


def test_weights_that_are_thrown_about_are_reported():
    """A tenth of their size in the usual step is too much; the worst is named, the others are counted."""
    (finding,) = found(course(1e-4, 0.02, 0.05))

    assert (finding.severity, finding.site, finding.step) == ("warning", "l2.weight:update", 0)
    assert finding.message == (
        "l2.weight changed by more than 0.1 times its size in half of the last optimizer steps "
        "(0.5; first seen at step 0); so did 1 more of 3 weights."
    )
    assert finding.evidence.ratios == {"l2.weight": 0.5, "l1.weight": 0.2}
    assert finding.remedy.startswith("Lower the learning rate")


def test_weights_that_never_move_are_reported():
    """A millionth of their size, all through the run, teaches nothing."""
    (finding,) = found(course(1e-9, 1e-4))

    assert (finding.site, finding.evidence.concerned) == ("l0.weight:update", 1)
    assert (
        "l0.weight changed by less than 1e-06 times its size in 90% of the optimizer steps"
        in finding.message
    )
    assert "float32 master weights" in finding.remedy


def test_updates_that_are_rounded_away_are_reported():
    """In bfloat16 a small update leaves the weight as it was; the evidence names the dtype."""
    made = Course(SAMPLES)
    made.weight("fc", steady(0.1, 1e-3, 0.0), dtype="bfloat16")

    (finding,) = found(made)

    assert (finding.evidence.dtype, finding.evidence.ratios) == (
        "bfloat16",
        {"fc.weight": 0.0},
    )


@pytest.mark.parametrize(
    "decay", [lambda i: 1e-4 * (1 - i / 60) ** 8, lambda i: 1e-4 if i < 10 else 0.0]
)
def test_a_decayed_learning_rate_is_no_finding(decay):
    """What moved once is allowed to come to rest."""
    made = Course(SAMPLES)
    made.weight("fc", lambda i: (0.1, 1e-3, decay(i), 1e-3))

    assert found(made) == []


def test_a_bold_start_is_no_finding():
    """Only the end of the run is judged for too large."""
    made = Course(SAMPLES)
    made.weight("fc", lambda i: (0.1, 1e-3, 0.05 if i < 30 else 1e-4, 1e-3))

    assert found(made) == []


def test_a_weight_that_started_at_zero_is_not_judged_for_too_large():
    """Whatever it becomes is large against nothing, as in the second factor of LoRA."""
    made = Course(SAMPLES)
    made.weight("lora", lambda i: (1e-4 if i else 0.0, 1e-3, 5e-5, 1e-3))

    assert found(made) == []


def test_vectors_are_not_judged():
    """Biases start at zero and gains at one."""
    made = Course(SAMPLES)
    made.weight("norm", steady(0.1, 1e-3, 0.05), shape=[16])

    assert found(made) == []


@pytest.mark.parametrize(
    ("entry", "gradient"),
    [({"type": "Embedding"}, 1e-3), ({}, 0.0), ({}, 1e-9)],
    ids=["table", "no gradient", "faded"],
)
def test_a_weight_that_gets_no_gradient_is_not_judged_for_too_small(entry, gradient):
    """That it does not move is not the learning rate's doing."""
    made = course(1e-4)
    made.weight("still", steady(0.1, gradient, 1e-12), **entry)

    assert found(made) == []


def test_a_model_without_any_gradient_is_not_judged_for_too_small():
    """If all its units are dead nothing moves, whatever the learning rate."""
    assert found(course(0.0, 0.0, gradient=0.0)) == []


def test_a_few_samples_are_no_course():
    """Twenty samples are asked for."""
    made = Course(range(19))
    made.weight("fc", steady(0.1, 1e-3, 0.09))

    assert found(made) == []


def test_a_weight_without_any_gradient_is_not_judged_for_too_small():
    """It is in the optimizer and in no forward; UNUSED-PARAM says so."""
    made = course(1e-4)
    made.weight("idle", lambda i: (0.1, None, 0.0, None))

    assert found(made) == []


def test_without_any_gradients_recorded_the_updates_decide():
    """As where only parameters are watched."""
    made = Course(SAMPLES)
    made.weight("fc", lambda i: (0.1, None, 1e-9, None))

    assert len(found(made)) == 1


def test_a_root_without_any_gradient_is_for_another_rule():
    """Where another root of the program gets some: UNUSED-PARAM speaks of it."""
    made = course(1e-4)
    made.weight("Other.fc", lambda i: (0.1, None, 0.0, None), root=1)

    assert found(made) == []


@golden("UPDATE-RATIO", lacks=(1, 20))
def golden_update_ratio(*, fires: bool) -> Golden:
    """Change one weight by a half of its size in every step, or by a thousandth."""
    course = Course(SAMPLES[:20])
    course.weight("fc", steady(0.1, 1e-3, 0.05 if fires else 1e-4))
    course.weight("head", steady(0.1, 1e-3, 1e-4))
    return written(course)


@pytest.mark.parametrize(
    ("loss", "severity"),
    [
        (lambda i: 3 - i / 60, "info"),
        (lambda i: 3 - min(i, 30) / 60, "warning"),
        (lambda i: 3 - i / 60 if i < 59 else math.nan, "warning"),
    ],
    ids=["falls to the end", "falls no more", "ends badly"],
)
def test_large_steps_are_a_hint_while_the_loss_falls(loss, severity):
    """Then they do no harm that could be seen."""
    made = Course(SAMPLES)
    made.weight("fc", steady(0.1, 1e-3, 0.02))
    noise = itertools.cycle((0.001, -0.001))
    made.loss([loss(i) + next(noise) for i in range(60)])

    (finding,) = found(made)

    assert finding.severity == severity
    assert ("The loss still falls." in finding.message) == (severity == "info")
