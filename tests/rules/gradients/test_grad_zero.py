"""GRAD-ZERO: exactly zero, for long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kedge.rules.gradients.grad_zero import GradZero
from kedge.rules.rule import Finding
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, steady

STEPS = range(0, 300, 10)


def course(*gradients: float | Callable[[int], float | None], **entry: Any) -> Course:
    """Make layers l0, l1, ... with these gradients."""
    made = Course(STEPS)
    for i, gradient in enumerate(gradients):
        if callable(gradient):
            made.weight(f"l{i}", lambda n, g=gradient: (0.1, g(n), 1e-4, None), **entry)
        else:
            made.weight(f"l{i}", steady(0.1, gradient, 1e-4), **entry)
    return made


def found(made: Course) -> list[Finding]:
    """Run the rule."""
    return list(GradZero().check(made.recording()))


def test_gradients_that_are_zero_all_the_time_are_reported():
    """They are named in the order of the flow, with the first module towards the loss that gets one."""
    (finding,) = found(course(0.0, 0.0, 1e-3))

    assert (finding.severity, finding.site, finding.step) == ("warning", "l1.weight:param.grad", 0)
    assert finding.message == (
        "The gradients of 2 parameters were exactly zero in at least the last 20 measured steps, since step 0: "
        "l0.weight, l1.weight. l2.weight, nearer to the loss, gets a gradient."
    )
    assert finding.entry()["evidence"] == {
        "kind": "some",
        "parameters": ["l0.weight", "l1.weight"],
        "of": 3,
        "next_with_gradient": "l2.weight",
    }


def test_a_model_that_never_got_anything_else_is_an_error():
    """It stands still."""
    (finding,) = found(course(0.0, 0.0))

    assert finding.severity == "error"
    assert finding.evidence.next_with_gradient is None
    assert finding.message.endswith(": l0.weight, l1.weight.")


def test_a_model_that_has_come_to_rest_is_a_warning():
    """A hinge that every sample has passed gives zeros, and nothing is wrong."""
    (finding,) = found(course(lambda i: 1e-3 if i < 8 else 0.0, lambda i: 1e-3 if i < 5 else 0.0))

    assert (finding.severity, finding.step) == ("warning", 80)


@pytest.mark.parametrize(("zeros", "number"), [(19, 0), (20, 1), (30, 1)])
def test_twenty_samples_in_a_row_are_asked_for(zeros, number):
    """A factor that starts at zero hides its branch for a step or two."""
    assert len(found(course(lambda i: 1e-3 if i < 30 - zeros else 0.0, 1e-3))) == number


@pytest.mark.parametrize(("update", "says"), [(0.5, True), (1e-3, False)])
def test_a_long_step_just_before_the_zeros_is_named(update, says):
    """Units that a step has thrown where they never fire pass no gradient on; as after a sum of squares."""
    made = Course(STEPS)
    made.weight("l0", lambda i: (1.0, 1e-3 if i < 8 else 0.0, update if i == 7 else 1e-4, None))
    made.weight("l1", steady(1.0, 1e-3, 1e-4))
    (finding,) = found(made)

    assert (
        "Just before, a step changed l0.weight by 0.5 times its size" in finding.message
    ) == says
    assert finding.remedy.startswith("Lower the learning rate") == says


def test_what_moves_again_is_no_finding():
    """The last samples count."""
    assert found(course(lambda i: 0.0 if i < 29 else 1e-3, 1e-3)) == []


@pytest.mark.parametrize("gradient", [1e-30, 1e-150])
def test_small_is_not_zero(gradient):
    """That is for GRAD-VANISH."""
    assert found(course(gradient, 1e-3)) == []


def test_a_sum_of_squares_that_underflows_is_not_zero():
    """Where the extremes were measured, they decide."""
    made = course(0.0, 1e-3)
    for row in made.rows:
        if row["site"] == "l0.weight:param.grad":
            row |= {"min": -1e-30, "max": 0.0}

    assert found(made) == []


def test_steps_without_a_gradient_and_light_ones_do_not_count():
    """Neither an absent gradient nor a step that was not measured in full is a zero."""
    made = course(lambda i: None if i % 2 else 0.0, 1e-3)
    made.rows += [
        {"step": step + 1, "site": "l0.weight:param.grad", "count": 16, "sumsq": 0.0, "level": 1}
        for step in STEPS
    ]
    made.rows += [
        {"step": step + 2, "site": "l0.weight:param.grad", "count": 0, "sumsq": 0.0}
        for step in STEPS
    ]

    assert found(made) == []


def test_parameters_of_the_module_itself_are_not_the_next_one():
    """A bias that learns does not say where the gradient of its weight was cut."""
    made = course(0.0, 1e-3)
    made.sites.append(
        {"site": "l0.bias:param.grad", "path": "l0.bias", "kind": "param.grad", "owner": "l0"}
    )
    made.rows += [
        {"step": step, "site": "l0.bias:param.grad", "count": 4, "sumsq": 1.0} for step in STEPS
    ]

    (finding,) = found(made)

    assert finding.evidence.next_with_gradient == "l1.weight"


def test_many_are_counted():
    """The six nearest to the loss are named."""
    (finding,) = found(course(*[0.0] * 9, 1e-3))

    assert (
        "l3.weight, l4.weight, l5.weight, l6.weight, l7.weight, l8.weight and 3 before them."
        in finding.message
    )


def test_roots_are_judged_one_by_one():
    """A critic that stands still is not excused by a generator that learns."""
    made = course(1e-3, 1e-3)
    made.weight("C.l0", steady(0.1, 0.0, 0.0), root=1)

    (finding,) = found(made)

    assert (finding.severity, finding.site) == ("error", "C.l0.weight:param.grad")


def test_a_bias_that_cancels_is_no_finding():
    """A loss of differences gives it nothing, as where two images go through one network; its weight learns."""
    made = course(1e-3, 1e-3)
    made.sites.append(
        {"site": "l1.bias:param.grad", "path": "l1.bias", "kind": "param.grad", "owner": "l1"}
    )
    made.rows += [
        {"step": step, "site": "l1.bias:param.grad", "count": 4, "sumsq": 0.0} for step in STEPS
    ]

    assert found(made) == []


def test_a_bias_beside_a_weight_without_a_gradient_is_named_with_it():
    """There the gradient is cut."""
    made = course(0.0, 1e-3)
    made.sites.append(
        {"site": "l0.bias:param.grad", "path": "l0.bias", "kind": "param.grad", "owner": "l0"}
    )
    made.rows += [
        {"step": step, "site": "l0.bias:param.grad", "count": 4, "sumsq": 0.0} for step in STEPS
    ]

    assert found(made)[0].evidence.parameters == ["l0.weight", "l0.bias"]


def test_a_bias_beside_a_weight_that_is_frozen_is_named():
    """That the weight learns would show that the gradient arrives."""
    made = course(lambda i: None, 1e-3)
    made.sites.append(
        {"site": "l0.bias:param.grad", "path": "l0.bias", "kind": "param.grad", "owner": "l0"}
    )
    made.rows += [
        {"step": step, "site": "l0.bias:param.grad", "count": 4, "sumsq": 0.0} for step in STEPS
    ]

    assert found(made)[0].evidence.parameters == ["l0.bias"]


def resting(loss: float, *, begin: float = 1e-3) -> Course:
    """Make a model whose gradients become zero in the eighth sample, with its loss from there on."""
    made = course(lambda i: begin if i < 8 else 0.0, lambda i: begin if i < 8 else 0.0)
    made.loss([1.0 if i < 8 and begin else loss for i in range(30)], every=10)
    return made


@pytest.mark.parametrize(("loss", "number"), [(0.0, 0), (1e-8, 1), (0.5, 1)])
def test_a_loss_that_is_zero_has_no_gradient(loss, number):
    """A hinge that every sample has passed is no fault; gradients of another loss are."""
    assert len(found(resting(loss))) == number


def test_one_loss_of_two_that_is_zero_is_not_enough():
    """The other one asks for a gradient."""
    made = resting(0.0)
    made.loss([0.5] * 30, every=10, site="loss_2", path="loss_2")

    assert len(found(made)) == 1


def test_a_loss_that_was_never_anything_but_zero_is_an_error():
    """As cross-entropy of one class."""
    (finding,) = found(resting(0.0, begin=0.0))

    assert finding.severity == "error"


def test_weights_that_are_zero_are_named_as_the_source():
    """A product with them is zero; the general advice comes after."""
    made = course(0.0)
    made.weight("l1", steady(0.0, 1e-3, 1e-4))
    (finding,) = found(made)

    assert finding.remedy.startswith(
        "l1.weight is zero in every measured step: a product with it is zero, so initialise it. Otherwise look "
    )


def test_several_zero_weights_are_named_together():
    """The weight whose own gradient is zero and one behind it."""
    made = Course(STEPS)
    made.weight("l0", steady(0.0, 0.0, 0.0))
    made.weight("l1", steady(0.0, 1e-3, 1e-4))
    (finding,) = found(made)

    assert finding.remedy.startswith("l0.weight, l1.weight are zero in every measured step")


@pytest.mark.parametrize(("second", "number"), [(0.0, 1), (0.1, 0)])
def test_two_factors_of_zero_are_seen_after_few_samples(second, number):
    """Neither gives the other a gradient; one factor alone that starts at zero, as in LoRA, leaves it."""
    made = course(1e-3)
    for path, weight in (("A", 0.0), ("B", second)):
        made.weight(path, lambda i, w=weight: (w, 0.0, 0.0, None) if i >= 24 else (None,) * 4)
    findings = found(made)

    assert len(findings) == number
    assert all("A.weight, B.weight are zero" in finding.remedy for finding in findings)


@pytest.mark.parametrize(("low", "says"), [(1.0, True), (0.9, False)])
def test_what_is_one_whatever_it_was_given_is_named(low, says):
    """The softmax of one number; an output that is nearly so has a slope."""
    made = course(0.0, 0.0)
    made.sites.append({"site": ":out", "path": "", "kind": "out", "shape": [8, 1]})
    made.rows += [
        {"step": i, "site": ":out", "count": 8, "sum": 8.0, "sumsq": 8.0, "min": low, "max": 1.0}
        for i in STEPS
    ]
    for row in made.rows:
        row["level"] = 2
    (finding,) = found(made)

    assert finding.remedy.startswith(":out is 1 in all elements") == says


def test_a_weight_that_was_zero_at_first_only_is_not_the_source():
    """It is what its gradient made of it since."""
    made = course(0.0)
    made.weight("l1", lambda i: (0.0 if i < 29 else 1e-6, 1e-3, 1e-4, None))
    (finding,) = found(made)

    assert finding.remedy.startswith("Look ")


def test_a_zero_weight_before_the_cut_is_not_the_source():
    """Gradients pass from the loss to it, so it blocks nothing nearer to the loss."""
    made = Course(STEPS)
    made.weight("l0", steady(0.0, 1e-3, 1e-4))
    made.weight("l1", steady(0.1, 0.0, 0.0))
    made.weight("l2", steady(0.1, 1e-3, 1e-4))
    (finding,) = found(made)

    assert finding.remedy.startswith("Look ")


def test_a_vector_of_zeros_is_not_the_source():
    """A bias is zero at first, and in nothing a factor."""
    made = course(0.0)
    made.weight("l1", steady(0.0, 1e-3, 1e-4), shape=[4])
    for site in made.sites:
        if site.get("owner") == "l1":
            site["shape"] = [4]
    (finding,) = found(made)

    assert finding.remedy.startswith("Look ")


@pytest.mark.parametrize(
    ("name", "says"), [("weight_hh_l0_reverse", True), ("weight_ih_l0_reverse", False)]
)
def test_a_recurrent_weight_may_have_seen_no_state(name, says):
    """Its gradient is a product with the state before; that of the input is not."""
    made = course(1e-3)
    made.sites.append(
        {
            "site": f"rnn.{name}:param.grad",
            "path": f"rnn.{name}",
            "kind": "param.grad",
            "owner": "rnn",
        }
    )
    made.rows += [
        {"step": step, "site": f"rnn.{name}:param.grad", "count": 4, "sumsq": 0.0} for step in STEPS
    ]
    (finding,) = found(made)

    assert ("its gradient is a product with the state before" in finding.remedy) == says
    assert ("out[:, -1]" in finding.remedy) == says


def test_a_recurrent_layer_without_any_gradient_has_another_reason():
    """The weight of its input gets none either, whatever the state was: here the layer after it is zero."""
    made = Course(STEPS)
    for name in ("weight_ih_l0", "weight_hh_l0"):
        made.weight("rnn", steady(0.1, 0.0, 1e-4))
        for site in made.sites:
            if site["site"].startswith("rnn.weight:"):
                site["site"] = site["site"].replace("weight", name)
                site["path"] = f"rnn.{name}"
        for row in made.rows:
            row["site"] = row["site"].replace("rnn.weight:", f"rnn.{name}:")
    made.sites = [*{site["site"]: site for site in made.sites}.values()]
    made.weight("fc", lambda i: (0.1 if i == 0 else 0.0, 1e-3, 1e-4, None))
    made.rows = [row for row in made.rows if row["step"] > 0 or "rnn" not in row["site"]]
    (finding,) = found(made)

    assert finding.remedy.startswith("fc.weight is zero in every measured step from step 10 on")
    assert "the state" not in finding.remedy


@pytest.mark.parametrize(("sizes", "number"), [((0, 0), 2), ((0, 8), 0), ((8, 8), 0)])
def test_experts_that_no_sample_reaches_are_said_to_be_idle(sizes, number):
    """They were called with an empty batch: nothing on the way to them has slope zero."""
    made = course(0.0, 0.0, 1e-3)
    for path, size in zip(("l0", "l1"), sizes, strict=True):
        made.rows += [
            {"step": step, "site": f"{path}:out", "count": 4 * size, "sumsq": 0.0} for step in STEPS
        ]

    (finding,) = found(made)

    said = "l0, l1 were called without a sample in these steps." in finding.message
    assert said == (number == 2)
    assert ("gate of a mixture of experts" in finding.remedy) == said


@golden("GRAD-ZERO", lacks=(1, 20))
def golden_grad_zero(*, fires: bool) -> Golden:
    """Cut the gradient before the first of two layers, in all of twenty samples or in nineteen."""
    course = Course(SAMPLES[:20])
    course.weight("fc", lambda i: (0.1, 0.0 if fires or i else 1e-3, 0.0, 0.0))
    course.weight("head", steady(0.1, 1e-3, 1e-4))
    return written(course)
