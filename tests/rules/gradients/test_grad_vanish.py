"""GRAD-VANISH: relative over depth, and agreed on by two measures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kedge.rules.gradients.grad_vanish import GradVanish
from kedge.rules.rule import Finding
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, steady


def fading(
    factor: float, *, layers: int = 9, update: Callable[[float], float] | None = None
) -> Course:
    """Make a stack in which the gradient shrinks by a factor from layer to layer towards the input."""
    course = Course(SAMPLES)
    for i in range(layers):
        gradient = 1e-2 * factor ** (layers - 1 - i)
        course.weight(
            f"l{i}", steady(0.1, gradient, 0.1 * gradient if update is None else update(gradient))
        )
    return course


def found(course: Course) -> list[Finding]:
    """Run the rule."""
    return list(GradVanish().check(course.recording()))


def test_a_gradient_that_fades_with_depth_is_reported():
    """Three orders of magnitude between the thirds, and weights that hardly move."""
    (finding,) = found(fading(0.1))

    assert (finding.severity, finding.site, finding.step) == ("warning", "l0.weight:param.grad", 0)
    assert finding.message == (
        "The first third of the layers of Net (l0.weight to l2.weight) hardly learns: its gradient relative to the weights "
        "is 1.0e-06 times that of the last third (median of 30 measured steps, from step 0 on)."
    )
    assert finding.evidence.ratio_of_output_gradients == pytest.approx(1e-6)
    assert finding.evidence.shallow_update_ratio == pytest.approx(1e-9)
    assert finding.evidence.deep_update_ratio == pytest.approx(1e-3)
    assert list(finding.evidence.profile) == [f"l{i}.weight" for i in range(9)]
    assert finding.remedy.startswith("Replace sigmoid and tanh, if there are any")
    assert finding.remedy.endswith("or residual connections.")


@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5])
def test_a_healthy_stack_is_clean(factor):
    """A gradient that stays, grows or loses a little towards the input is no finding."""
    assert found(fading(factor)) == []


def test_fixed_limits_play_no_part():
    """A loss scaled down to nothing shrinks all gradients alike, and that is not what vanishing means."""
    course = Course(SAMPLES)
    for i in range(9):
        course.weight(f"l{i}", steady(0.1, 1e-12, 1e-4))

    assert found(course) == []


def test_thin_output_gradients_alone_are_no_finding():
    """Where a layer is wide or an image large, each element gets little though the weights get enough."""
    course = Course(SAMPLES)
    for i in range(9):
        course.weight(f"l{i}", steady(0.1, 1e-2, 1e-4, arriving=1e-2 if i > 5 else 1e-7))

    assert found(course) == []


def test_small_gradients_of_weights_alone_are_no_finding():
    """A large weight of which little is used in a step gets a small gradient relative to its size."""
    course = Course(SAMPLES)
    for i in range(9):
        course.weight(f"l{i}", steady(0.1, 1e-2 if i > 5 else 1e-7, 1e-9, arriving=1e-2))

    assert found(course) == []


def test_what_the_optimizer_makes_up_for_is_no_finding():
    """Adam divides by the gradient's size: weights that move as fast as the others do learn."""
    assert found(fading(0.2, update=lambda gradient: 1e-4)) == []


def test_what_the_optimizer_makes_up_for_in_part_is_reported():
    """Weights that move a hundredth as fast as those at the other end are left behind."""
    (finding,) = found(fading(0.2, update=lambda gradient: 1e-3 if gradient > 1e-4 else 1e-6))

    assert finding.evidence.shallow_update_ratio == pytest.approx(1e-5)


def test_what_no_optimizer_makes_up_for_is_reported():
    """Below a millionth the optimizer scales up noise."""
    (finding,) = found(fading(0.05, update=lambda gradient: 1e-4))

    assert finding.evidence.ratio < 1e-6


def test_a_cut_gradient_has_not_faded():
    """Exactly zero is GRAD-ZERO's."""
    course = Course(SAMPLES)
    for i in range(9):
        course.weight(f"l{i}", steady(0.1, 1e-2 if i > 2 else 0.0, 1e-4 if i > 2 else 0.0))

    assert found(course) == []


def test_frozen_layers_are_not_counted():
    """Layers without a gradient belong to no third."""
    course = Course(SAMPLES)
    for i in range(12):
        frozen = i < 6
        course.weight(
            f"l{i}", lambda i, f=frozen: (0.1, None, None, None) if f else (0.1, 1e-2, 1e-4, 1e-2)
        )

    assert found(course) == []


def test_embeddings_are_not_counted():
    """Most rows of a table get no gradient in a step, so that its size says nothing."""
    course = Course(SAMPLES)
    for i in range(8):
        shallow = i < 2
        kind = "Embedding" if shallow else "Linear"
        course.weight(
            f"l{i}", steady(1.0, 1e-9 if shallow else 1e-2, 1e-12 if shallow else 1e-4), type=kind
        )

    assert found(course) == []


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_a_shallow_model_has_no_depth(layers):
    """With fewer than six weights a third is a single layer, which may be anything."""
    assert found(fading(0.001, layers=layers)) == []


def test_a_few_samples_are_no_course():
    """Twenty samples are asked for; five where each is hopeless."""
    assert [len(found(cut(fading(0.2), samples))) for samples in (19, 20)] == [0, 1]
    assert [len(found(cut(fading(0.001), samples))) for samples in (4, 5)] == [0, 1]


def cut(course: Course, samples: int) -> Course:
    """Leave only the first samples."""
    steps = set(list(SAMPLES)[:samples])
    course.rows = [row for row in course.rows if row["step"] in steps]
    return course


def test_a_recovered_gradient_is_forgiven():
    """The median over the window counts: a bad start is no finding."""
    course = Course(SAMPLES)
    for i in range(9):
        weak = 0.1 ** (8 - i)
        course.weight(
            f"l{i}",
            lambda n, w=weak: (
                (0.1, 1e-2 * w, 1e-3 * w, 1e-2 * w) if n < 12 else (0.1, 1e-2, 1e-4, 1e-2)
            ),
        )

    assert found(course) == []


def test_only_the_end_of_a_long_run_is_judged():
    """What was bad for longer than it is good now is over all the same."""
    course = Course(range(300))
    for i in range(9):
        weak = 0.1 ** (8 - i)
        course.weight(
            f"l{i}",
            lambda n, w=weak: (
                (0.1, 1e-2 * w, 1e-3 * w, 1e-2 * w) if n < 190 else (0.1, 1e-2, 1e-4, 1e-2)
            ),
        )

    assert found(course) == []


def test_every_root_is_judged_by_itself():
    """The deep third of one model says nothing of the shallow third of another."""
    course = fading(1.0)
    course.roots.append({"name": "Critic", "prefix": "Critic", "parameters": 10})
    for i in range(9):
        course.weight(f"Critic.l{i}", steady(0.1, 1e-9, 1e-11), root=1)

    assert found(course) == []


def test_without_updates_and_output_gradients_it_says_so_with_less_confidence():
    """What is not recorded cannot confirm."""
    course = fading(0.1)
    course.rows = [row for row in course.rows if not row["site"].endswith((":update", ":out.grad"))]

    (finding,) = found(course)

    assert finding.confidence == 0.7
    assert finding.evidence.shallow_update_ratio is None


def test_steps_that_are_not_finite_are_left_out():
    """A NaN in the last steps does not hide what went before."""
    course = fading(0.1)
    for row in course.rows:
        if row["step"] >= 280:
            row["sumsq"] = float("nan")

    (finding,) = found(course)

    assert finding.evidence.samples == 28


@golden("GRAD-VANISH")
def golden_grad_vanish(*, fires: bool) -> Golden:
    """Fade the gradient by ten from layer to layer, or by less than two."""
    course = Course(SAMPLES[:20])
    for i in range(6):
        gradient = 1e-2 * (0.1 if fires else 0.6) ** (5 - i)
        course.weight(f"l{i}", steady(0.1, gradient, gradient / 100))
    return written(course)
