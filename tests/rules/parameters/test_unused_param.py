"""UNUSED-PARAM: parameters that get gradients and belong to no optimizer; what the ledger says is tested with it."""

from __future__ import annotations

import pytest

from kedge.rules.parameters.unused_param import UnusedParam
from kedge.rules.rule import Finding
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, steady

FIGURES = steady(0.1, 1e-3, 1e-4)


def course(*held: bool, steps: int = 4, root: int = 0, prefix: str = "") -> Course:
    """Make weights of which some are in an optimizer."""
    made = Course(range(0, 10 * steps, 10))
    for i, known in enumerate(held):
        figures = FIGURES if known else steady(None, 1e-3, None, 1e-3)
        made.weight(f"{prefix}l{i}", figures, root=root)
        if not known:
            made.sites = [
                s
                for s in made.sites
                if (s.get("path"), s.get("kind")) not in _of(f"{prefix}l{i}.weight")
            ]
    return made


def _of(path: str) -> set[tuple[str, str]]:
    return {(path, "param"), (path, "update")}


def found(made: Course) -> list[Finding]:
    """Run the rule."""
    return list(UnusedParam().check(made.recording()))


def test_a_parameter_that_no_optimizer_holds_is_reported():
    """It got gradients, and nothing ever moved it."""
    (finding,) = found(course(True, False, False))

    assert (finding.severity, finding.site, finding.step) == ("warning", "l1.weight:param.grad", -1)
    assert finding.message == (
        "l1.weight:param.grad, l2.weight:param.grad got gradients, but no optimizer that stepped has it."
    )
    assert finding.entry()["evidence"] == {
        "sites": ["l1.weight:param.grad", "l2.weight:param.grad"],
        "cause": "in no optimizer",
        "of": 3,
    }
    assert "requires_grad_(False)" in finding.remedy


def test_parameters_that_an_optimizer_holds_are_no_finding():
    """That is how it should be."""
    assert found(course(True, True)) == []


def test_a_model_of_which_nothing_is_trained_is_no_finding():
    """As where an image is, or where the optimizer is not torch's."""
    assert found(course(False, False)) == []


@pytest.mark.parametrize(("steps", "number"), [(2, 0), (3, 1)])
def test_an_optimizer_may_step_every_few_backwards(steps, number):
    """Three measured steps are asked for."""
    assert len(found(course(True, False, steps=steps))) == number


def test_off_schedule_steps_do_not_count():
    """There nothing is seen of parameters."""
    made = course(True, False, steps=2)
    made.rows += [
        {"step": step, "site": "l1.weight:param.grad", "count": 16, "sumsq": 1.0, "level": 1}
        for step in range(1, 9)
    ]

    assert found(made) == []


def test_one_sight_of_it_in_an_optimizer_is_enough():
    """As a parameter or as an update."""
    for kind in ("param", "update"):
        made = course(True, False)
        made.sites.append(
            {"site": f"l1.weight:{kind}", "path": "l1.weight", "kind": kind, "owner": "l1"}
        )

        assert found(made) == []


def test_roots_are_judged_one_by_one():
    """A frozen teacher beside a student has no optimizer, and needs none."""
    made = course(True, True)
    teacher = course(False, False, root=1, prefix="Teacher.")
    made.sites, made.rows = made.sites + teacher.sites, made.rows + teacher.rows

    assert found(made) == []


def test_many_are_counted():
    """Six are named."""
    (finding,) = found(course(True, *[False] * 9))

    assert "l6.weight:param.grad and 3 more got gradients" in finding.message


def in_ledger(update: float, *, alone: bool = False) -> Course:
    """A weight that no backward has reached, in an optimizer whose steps change it so much, beside another or alone."""
    made = course(*[True][: not alone])
    made.weight("idle", lambda i: (0.1, None, update, None))
    cause = "no observed backward pass reached it"
    entry = {
        "site": "idle.weight:param.grad",
        "fired": 0,
        "cause": cause,
        "remedy": "use it in the forward",
    }
    made.events = [{"kind": "ledger", "sites": [entry]}]
    return made


def test_a_parameter_that_its_optimizer_skips_is_reported():
    """The updates of a parameter without a gradient are recorded, and are zero."""
    (finding,) = found(in_ledger(0.0))

    assert (finding.severity, finding.site) == ("warning", "idle.weight:param.grad")
    assert "got no gradient in the whole run" in finding.message


def test_a_model_of_which_nothing_gets_a_gradient_is_an_error():
    """The optimizer steps, and trains nothing; if it holds another model than the one with gradients, that is said elsewhere."""
    made = in_ledger(0.0, alone=True)
    made.roots[0]["trained"] = True
    (finding,) = found(made)
    assert (finding.severity, finding.site) == ("error", "idle.weight:param.grad")

    made.roots.append({"name": "policy", "prefix": "policy", "parameters": 16})
    graded = {"unheld": ["policy.weight"], "graded": ["policy.weight"]}
    made.events.append({"kind": "not-optimized", "root": 1, "replaced": [], **graded})
    assert found(made) == []


def test_a_parameter_that_was_moved_is_trained_whatever_the_ledger_says():
    """As by an optimizer that makes its gradients itself."""
    assert found(in_ledger(1e-4)) == []


@golden("UNUSED-PARAM", lacks=(0, 1))
def golden_unused_param(*, fires: bool) -> Golden:
    """Pass one of two weights that get gradients to the optimizer, or both."""
    course = Course(SAMPLES[:4])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.weight("head", steady(0.1, 1e-3, 1e-4))
    left_out = {"head.weight:param", "head.weight:update"} if fires else set()
    course.sites = [
        site for site in course.sites if f"{site.get('path')}:{site.get('kind')}" not in left_out
    ]
    course.rows = [row for row in course.rows if row["site"] not in left_out]
    return written(course)
