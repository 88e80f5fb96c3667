"""NAN-BORN between two samples: what is known there, what is worked out, and what is not."""

from __future__ import annotations

import pytest

from kedge.json_input.classes import as_json
from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.rule import Finding
from kedge.store.recording import Recording
from tests.rules.scenes import AFTER_LOG, FINITENESS, INF, NAN, Scene, all_of, chain, row


def found(scene: Scene | Recording) -> list[Finding]:
    """Run the rule."""
    return list(NanBorn().check(scene if isinstance(scene, Recording) else scene.recording()))


def only(scene: Scene | Recording) -> Finding:
    """Run the rule, which finds one thing."""
    (finding,) = found(scene)
    return finding


def broken(scene: Scene, bad: dict[str, float], *, level: int = 2, step: int = 20) -> Scene:
    """Record two healthy steps and one that goes wrong."""
    scene.step(0)
    scene.step(10)
    scene.step(step, bad, level=level)
    return scene


def test_off_schedule_the_sum_tells():
    """A step between two samples, of which only sums are known, names its producer all the same."""
    bad = all_of(AFTER_LOG, -INF) | all_of(["fc.weight:param.grad", "head.weight:param.grad"], NAN)
    finding = only(broken(chain(), bad, level=FINITENESS, step=17))

    assert (
        finding.message
        == "log:out was the first to contain -inf, at step 17; its input was finite."
    )
    assert as_json(finding.evidence.near) == {
        "log:in": {"step": 10, "min": -0.25, "max": 0.5, "rms": 0.306186}
    }


def test_what_was_left_out_off_schedule_is_worked_out():
    """An input that is another output, and what ReLU makes of finite values, need no row of their own."""
    scene = chain()
    scene.step(0)
    bad = all_of(AFTER_LOG, NAN)
    scene.step(7, bad, level=FINITENESS, without=["relu:in", "relu:out", "log:in", "head:in"])

    assert (only(scene).site, only(scene).confidence) == ("log:out", 0.9)


def test_gradients_behind_a_clipping_do_not_hide_an_infinity_of_the_forward():
    """Off schedule every gradient may be spoiled by clipping: an infinity that a module in between healed is named."""
    scene = chain()
    scene.step(0)
    bad = {"log:out": -INF} | all_of(["fc.weight:param.grad", "head.weight:param.grad"], NAN)
    scene.step(17, bad, level=FINITENESS, without=["log:in", "head:in"])

    assert (only(scene).site, only(scene).severity) == ("log:out", "error")


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_module_that_was_left_out_may_have_passed_it_on(value):
    """The output of a ReLU is not measured off schedule: who takes it in is no second producer."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("log", "Log")
    scene.module("relu", "ReLU", ["log"])
    scene.module("head", of=["relu"], weight=True)
    scene.close("", "Net")
    scene.step(0)
    bad = all_of(["log:out", "head:out", ":out", "head.weight:param.grad"], value)
    scene.step(3, bad, level=FINITENESS, without=["relu:in", "relu:out", "head:in"])

    assert only(scene).site == "log:out"


def test_a_container_that_was_left_out_is_not_taken_to_be_finite():
    """Only of a module without others inside is it known what it makes of finite values."""
    scene = Scene()
    scene.open("", "Net")
    scene.open("block")
    scene.module("block.log", "Log")
    scene.close("block")
    scene.module("head", of=["block"], weight=True)
    scene.close("", "Net")
    scene.step(0)
    bad = all_of(["block.log:out", "head:out", ":out", "head.weight:param.grad"], NAN)
    scene.step(3, bad, level=FINITENESS, without=["block:out", "head:in"])

    assert only(scene).site == "block.log:out"


def test_on_schedule_what_has_no_row_did_not_run():
    """A branch that was not taken in this step passed nothing on."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("log", "Log")
    scene.module("branch", of=["log"])
    scene.close("", "Net")
    scene.step(0)
    scene.step(10, all_of(["log:out", ":out"], NAN), without=["branch:in", "branch:out"])

    assert only(scene).evidence.propagated == 1


def test_what_came_after_a_bad_output_is_not_worked_out_to_be_finite():
    """A module that usually returns its input makes a new tensor for once: who takes it is no second producer."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("fc")
    scene.module("jump", "Jump", ["fc"])
    scene.module("head", of=["fc"])
    scene.close("", "Net")
    scene.step(0)
    scene.step(
        3, all_of(["jump:out", "head:out", ":out"], NAN), level=FINITENESS, without=["head:in"]
    )

    assert only(scene).site == "jump:out"


def test_a_finite_sum_of_too_large_squares_is_finite():
    """Squares may overflow where no element does."""
    scene = chain()
    scene.step(0)
    scene.rows = [row(0, site["site"], [1e200, 1.0]) | {"nonfinite": -1} for site in scene.sites]

    assert scene.rows[0]["sumsq"] == INF
    assert found(scene) == []


def test_a_parameter_too_large_to_square_is_no_infinity():
    """Of parameters only the norm is measured; that it overflows does not make them infinite."""
    scene = chain()
    scene.step(0)
    scene.rows += [{"step": 10, "site": "fc.weight:param", "count": 4, "sumsq": INF}]

    assert found(scene) == []


def test_a_parameter_last_seen_before_is_said_so():
    """Off schedule a program that stopped in its backward leaves no row of the parameters."""
    scene = broken(chain(), {})
    scene.step(
        23,
        {"head:out": NAN, ":out": NAN},
        level=FINITENESS,
        without=["head.weight:param", "fc.weight:param"],
    )

    finding = only(scene)

    assert finding.message.endswith(
        "its input was finite, and so were its parameters when they were last recorded."
    )
    assert finding.confidence == 0.8
