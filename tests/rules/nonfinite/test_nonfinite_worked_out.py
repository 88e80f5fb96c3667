"""NAN-BORN off schedule: what was worked out gives way to what figures rule out, and is not told as seen."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.rules.nonfinite.advice import OperationAdvice
from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.rule import Finding
from tests.rules.scenes import FINITENESS, INF, NAN, Scene, all_of, row

LINEAR = "/site-packages/torch/nn/modules/linear.py"
KNOWN = {"dtype": "float32"}


def found(scene: Scene) -> list[Finding]:
    """Run the rule."""
    return list(NanBorn().check(scene.recording()))


def only(scene: Scene) -> Finding:
    """Run the rule, which finds one thing."""
    (finding,) = found(scene)
    return finding


def masked() -> Scene:
    """An attention whose scores are masked with -inf in every step, and what comes after it."""
    scene = Scene()
    scene.open("", "Net")
    scene.open("att", "Attention", [None])
    scene.module("att.q", of=[None], weight=True)
    scene.module("att.soft", "Softmax")
    scene.close("att", "Attention")
    scene.module("log", "Log", ["att"])
    scene.close("", "Net")
    scene.step(0, {"att.soft:in": -INF})
    scene.step(10, {"att.soft:in": -INF})
    return scene


def test_masked_scores_make_no_birth_of_a_softmax_that_was_not_looked_at():
    """Where scores hold -inf in every step, a NaN made elsewhere between two samples has one producer."""
    scene = masked()
    bad = {"att.soft:in": -INF, **all_of(["log:out", ":out", "att.q.weight:param.grad"], NAN)}
    scene.step(17, bad, level=FINITENESS, without=["att.soft:out", "log:in"])

    assert only(scene).site == "log:out"


def test_a_softmax_of_masked_scores_that_was_not_looked_at_is_named_as_well():
    """A row that is masked all over makes a NaN of which the container's output is the first that is seen."""
    scene = masked()
    bad = {
        "att.soft:in": -INF,
        **all_of(["att:out", "log:out", ":out", "att.q.weight:param.grad"], NAN),
    }
    scene.step(17, bad, level=FINITENESS, without=["att.soft:out", "log:in"])

    finding = only(scene)

    assert finding.message == (
        "att:out was the first to contain NaN, at step 17; all modules inside it that were recorded returned finite "
        "values, so an operation in its own forward made it, or att.soft (Softmax) inside it did, which was not recorded."
    )
    assert "a row that is -inf everywhere" in finding.remedy


def two_linear(**root: Any) -> Scene:
    """Two linear maps of PyTorch's, one after the other."""
    scene = Scene()
    scene.roots[0] |= {
        "modules": [{"path": path, "type": "Linear", "file": LINEAR} for path in "ab"],
        **root,
    }
    scene.open("", "Net", **KNOWN)
    scene.module("a", weight=True, **KNOWN)
    scene.module("b", of=["a"], weight=True, node="AddmmBackward0", **KNOWN)
    scene.close("", "Net", **KNOWN)
    scene.step(0)
    return scene


def spoil(
    scene: Scene, *, large: float = 1.0, bad: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> None:
    """Add a light step in which the second linear map returns NaN; of values the norms are known too."""
    spoiled = {"b:out", ":out", "a.weight:param.grad", "b.weight:param.grad", *bad}
    for site in (site["site"] for site in scene.sites):
        if site not in without and not site.endswith((":out.grad", ":update")):
            values = [0.5, -0.25, 0.0, NAN if site in spoiled else large]
            norm = sum(value * value for value in values)
            scene.rows.append(row(7, site, values, level=FINITENESS) | {"sumsq": norm})


def test_a_linear_map_of_small_numbers_made_no_nan_of_what_it_takes_in_other_steps():
    """Where a linear map's figures cannot leave the range, its input was not what it is in the other steps."""
    scene = two_linear()
    spoil(scene, without=("b:in",))

    finding = only(scene)

    assert finding.message == (
        "b:out was the first to contain NaN, at step 7, although a:out before it was finite: "
        "an operation in the forward of Net made it, outside any watched module."
    )
    assert "products" not in finding.remedy


def test_a_linear_map_of_large_numbers_may_have_made_it_itself():
    """Where the product of the norms leaves the range, the linear map is named."""
    scene = two_linear()
    spoil(scene, large=1e18, without=("b:in",))

    assert only(scene).message.startswith(
        "b:out was the first to contain NaN, at step 7; its input and parameters were finite"
    )


def test_parameters_that_changed_within_a_step_are_named():
    """Where two optimizers take turns, one's step makes the weights NaN with which the other's forward goes on."""
    scene = two_linear()
    spoil(scene)

    finding = only(scene)

    assert "So its parameters changed between two calls in that step" in finding.message
    assert "b.weight:param.grad" in finding.message
    assert finding.remedy.startswith("Look at the loss")


def test_a_parameter_whose_squares_overflow_is_not_told_as_finite():
    """Off schedule, a parameter with infinities looks like one that is too large to square: the message names both."""
    scene = two_linear()
    spoil(scene, without=("b:in", "b.weight:param"))
    scene.rows.append(
        {"step": 7, "site": "b.weight:param", "count": 4, "sumsq": INF, "level": FINITENESS}
    )

    assert (
        "its input was finite, and b.weight:param was beyond 1e19 or infinite."
        in only(scene).message
    )


def test_the_node_of_what_a_container_passed_on_is_not_that_of_its_own_operation():
    """A container that returns what a module inside it made, in the steps in which nodes are noted, has none of its own."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("fc", node="AddmmBackward0")
    scene.close("", "Net", node="AddmmBackward0")
    scene.step(0)
    scene.step(7, {":out": NAN}, level=FINITENESS)

    finding = only(scene)

    assert finding.message.endswith("so an operation in its own forward made it.")
    assert "log, division" in finding.remedy


@pytest.mark.parametrize(("kind", "told"), [("BatchNorm1d", True), ("LayerNorm", False)])
def test_running_statistics_are_named_where_there_are_some(kind: str, told: bool):
    """What a batch norm keeps is no parameter, and spoils what it returns in eval mode."""
    assert ("running_var" in OperationAdvice("bn", kind, None, "float32", 0.0).advice()) is told
