"""NOT-OPTIMIZED: what the optimizer does not hold, and an optimizer that never steps."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.rules.parameters.not_optimized import NotOptimized
from kedge.rules.rule import Finding
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, steady, trained


def found(*events: dict[str, Any]) -> list[Finding]:
    """Run the rule over a trained model of two weights and some events."""
    return list(NotOptimized().check(trained(*events)))


def left(**entry: Any) -> dict[str, Any]:
    """Describe what is not optimized."""
    return {
        "kind": "not-optimized",
        "root": 0,
        "unheld": [],
        "unheld_elements": 0,
        "graded": [],
        "replaced": [],
        **entry,
    }


def test_an_optimizer_that_holds_what_the_model_lost_is_an_error():
    """Its steps change tensors that nothing computes with."""
    (finding,) = found(left(replaced=["fc.weight", "fc.bias"], unheld=["fc.weight", "fc.bias"]))

    assert (finding.severity, finding.site) == ("error", "fc.weight:param")
    assert finding.message == (
        "fc.weight, fc.bias of Net are not in the optimizer (Adam with a learning rate of 0.001): it holds other "
        "tensors under these names, and its steps do not change the model."
    )


def test_parameters_with_gradients_in_no_optimizer_are_a_warning():
    """Those without a gradient are not named beside them."""
    (finding,) = found(
        left(unheld=["a.weight", "head.weight"], graded=["fc.weight", "head.weight"]),
    )

    assert (finding.severity, finding.site) == ("warning", "head.weight:param")
    assert finding.message == (
        "head.weight of Net is in no optimizer, though trainable; it gets gradients but never changes."
    )


@pytest.mark.parametrize(("passes", "number"), [((6, 6), 1), ((6,), 0), ((2, 2), 0)])
def test_models_that_are_made_anew_count_together(passes, number):
    """One is made for each fold, and the optimizer of the first is kept."""
    made = Course(range(4))
    made.weight("fc", steady(0.1, 1e-3, 1e-4))
    made.roots = [{"name": "Net", "prefix": "", "parameters": 16, "trained": True}]
    for root, count in enumerate(passes, 1):
        made.roots.append({"name": f"m{root}", "prefix": f"m{root}", "trained": False})
        names = [f"m{root}.fc.weight"]
        made.events.append(left(root=root, unheld=names, graded=names, passes=count))
    findings = list(NotOptimized().check(made.recording()))

    assert [finding.site for finding in findings] == ["m1.fc.weight:param"] * number


def test_parameters_without_gradients_in_no_optimizer_are_a_hint():
    """UNUSED-PARAM says the rest."""
    (finding,) = found(left(unheld=["a.weight", "b.weight"]))

    assert (finding.severity, finding.message) == (
        "info",
        "a.weight, b.weight of Net are in no optimizer, though trainable.",
    )


def test_an_optimizer_of_something_unseen_is_a_hint():
    """It may train what is no module."""
    (finding,) = found({"kind": "not-optimized", "root": None, "foreign": 3})

    assert finding.severity == "info"
    assert "holds 3 parameters that belong to no model" in finding.message


@pytest.mark.parametrize(
    ("held", "severity"), [(None, "error"), (steady(0.1, 1e-3, 1e-4), "warning")]
)
def test_it_is_an_error_if_nothing_that_the_optimizer_holds_got_a_gradient(held, severity):
    """Gradients of what it does not hold are no training, though some are recorded in the first step."""
    made = Course(range(12))
    made.weight("fc", held or (lambda _: (0.1, None, None, None)))
    made.weight("bn", lambda i: (1.0, None if i else 1e-3, None, None))
    made.roots[0]["trained"] = True
    made.events = [
        left(unheld=["bn.weight"], graded=["bn.weight"]),
        {"kind": "optimizers", "optimizers": [{"index": 0, "type": "SGD", "roots": [0]}]},
    ]

    (finding,) = NotOptimized().check(made.recording())

    assert finding.severity == severity
    assert ("nothing is trained" in finding.message) == (severity == "error")


@pytest.mark.parametrize(("passes", "number"), [(9, 0), (10, 1)])
def test_a_model_that_no_optimizer_has_is_a_warning_if_it_gets_gradients_again_and_again(
    passes, number
):
    """One that was tried out once is none."""
    made = Course(range(12))
    made.weight("fc", steady(0.1, 1e-3, 1e-4))
    made.roots[0]["trained"] = True
    made.roots.append({"name": "Encoder", "prefix": "Encoder", "trained": False})
    made.events = [left(root=1, unheld=["Encoder.w"], graded=["Encoder.w"], passes=passes)]

    told = list(NotOptimized().check(made.recording()))

    assert [(finding.severity, finding.site) for finding in told] == [
        ("warning", "Encoder.w:param")
    ] * number


@pytest.mark.parametrize(
    "entry", [{"outside": ["Block"], "outside_fixed": True}, {"unheld": ["w"], "graded": ["w"]}]
)
def test_what_is_in_evaluation_mode_may_be_meant_to_stay_as_it_is(entry):
    """As a network whose features are compared."""
    made = Course(range(12))
    made.weight("fc", steady(0.1, 1e-3, 1e-4))
    made.roots[0]["trained"] = True
    made.roots.append({"name": "Vgg", "prefix": "Vgg", "trained": False})
    made.events = [left(root=1, training=False, passes=30, **entry)]

    (finding,) = NotOptimized().check(made.recording())

    assert finding.severity == "info"
    assert "requires_grad_(False)" in finding.remedy


def test_modules_that_a_model_calls_and_does_not_hold_are_a_warning():
    """Their parameters are in no list."""
    (finding,) = found(left(outside=["Block", "Block"]))

    assert (finding.severity, finding.site) == ("warning", ":out")
    assert finding.message == (
        "Net calls Block, Block but does not contain them: neither model.parameters() nor an optimizer has their "
        "parameters. They get gradients but never change."
    )
    assert "nn.ModuleList" in finding.remedy


def test_tensors_with_gradients_that_are_no_parameters_are_a_hint():
    """`requires_grad_()` makes no parameter; but the points of a differential equation require one too."""
    (finding,) = found(left(tensors=["position"]))

    assert (finding.severity, finding.site) == ("info", "position:param")
    assert finding.message.startswith(
        "position of Net is a tensor that requires a gradient, but is not an nn.Parameter"
    )


@pytest.mark.parametrize(("passes", "number"), [(9, 0), (10, 1)])
def test_an_optimizer_that_never_stepped_is_a_warning(passes, number):
    """A few passes may be added up."""
    told = found({"kind": "not-optimized", "root": None, "in_vain": passes})

    assert [finding.severity for finding in told] == ["warning"] * number
    assert all("never stepped in 10 backward passes" in finding.message for finding in told)


def test_nothing_is_said_where_all_is_held():
    """An event with empty lists is no finding."""
    assert found(left()) == []


def test_ranks_that_train_alike_are_one_finding():
    """Each of them wrote it down."""
    lost = left(replaced=["fc.weight"])

    assert len(found(lost, {**lost, "rank": 1}, {**lost, "rank": 2})) == 1


@golden("NOT-OPTIMIZED", lacks=(0, 1))
def golden_not_optimized(*, fires: bool) -> Golden:
    """Replace a head after the optimizer was made, or before."""
    course = Course(SAMPLES[:4])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.roots[0]["trained"] = True
    course.events = [
        {
            "kind": "optimizers",
            "optimizers": [{"index": 0, "type": "SGD", "roots": [0], "rates": [0.1]}],
        }
    ]
    if fires:
        lost = {
            "unheld": ["head.weight"],
            "unheld_elements": 40,
            "graded": ["head.weight"],
            "replaced": ["head.weight"],
        }
        course.events.append({"kind": "not-optimized", "root": 0, **lost})
    return written(course)
