"""SATURATED: flat, for long, where it is not meant to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kedge.rules.activations.saturated import Saturated
from kedge.rules.rule import Finding
from kedge.store.recording import Recording
from tests.rules.goldens import Golden, golden
from tests.rules.scenes import size

Share = float | Callable[[int], float]


def recording(
    *shares: Share, steps: int = 30, kind: str = "Tanh", after: bool = True, **columns: Any
) -> Recording:
    """Record activations with these shares of saturated outputs, and a layer after them."""
    sites: list[dict[str, Any]] = [{"site": f"a{i}:out", "type": kind} for i in range(len(shares))]
    rows = []
    for i, share in enumerate(shares):
        for step in range(steps):
            part = share(step) if callable(share) else share
            drawn = {"sampled": 200, "saturated": round(200 * part)}
            rows.append(size(10 * step, f"a{i}:out", 0.9) | drawn | columns)
    if after:
        sites.append({"site": "head:out", "type": "Linear"})
    return Recording.build([*sites, {"site": ":out", "type": "Net"}], rows)


def found(*shares: Share, **options: Any) -> list[Finding]:
    """Run the rule over such a recording."""
    return list(Saturated().check(recording(*shares, **options)))


def test_an_activation_that_is_flat_for_most_inputs_is_reported():
    """With its share, its course, and the others that are."""
    (finding,) = found(0.1, 0.6, 0.9)

    assert (finding.severity, finding.site, finding.step, finding.confidence) == (
        "warning",
        "a1:out",
        0,
        0.9,
    )
    assert finding.message == (
        "60% of the outputs of a1:out (Tanh) are where its slope is below 0.001 "
        "(median of the last 20 measured steps; first at step 0); also saturated: 1 more activation."
    )
    assert finding.evidence.shares == {"a1:out": 0.6, "a2:out": 0.9}
    assert finding.evidence.saturated_sites == 2
    assert finding.evidence.course == [0.6] * 6


@pytest.mark.parametrize(("share", "number"), [(0.5, 0), (0.51, 1)])
def test_a_half_is_the_border(share, number):
    """More than half of the outputs."""
    assert len(found(share)) == number


def test_a_swing_of_a_few_steps_is_no_finding():
    """The median of the window counts."""
    assert found(lambda step: 0.9 if step in range(15, 24) else 0.1) == []


def test_only_the_end_of_the_run_is_judged():
    """A bad start is forgiven, a bad end is not."""
    assert found(lambda step: 0.9 if step < 19 else 0.1, steps=30) == []

    (finding,) = found(lambda step: 0.9 if step > 14 else 0.1)

    assert finding.step == 150


def test_a_few_samples_are_no_evidence():
    """Ten measured steps are asked for."""
    assert found(0.9, steps=9) == []
    assert len(found(0.9, steps=10)) == 1


def test_samples_are_lacking_of_activations_that_are_judged():
    """One that is flat by design, or the last one, will not be judged with more of them."""
    lack = Saturated().lacking(recording(0.1, steps=3))

    assert lack is not None
    assert (lack.have, lack.need) == (3, 10)
    assert Saturated().lacking(recording(0.1, steps=3, kind="Softmax")) is None
    assert Saturated().lacking(recording(0.1, steps=3, after=False)) is None


@pytest.mark.parametrize("kind", ["ReLU6", "Softmax", "Hardswish", "LogSoftmax"])
def test_what_is_flat_by_design_is_no_finding(kind):
    """Below zero, or for every class but one."""
    assert found(0.9, kind=kind) == []


def test_the_last_activation_of_a_model_may_be_sure():
    """A sigmoid that gives probabilities is meant to come near zero and one; what holds it does not come after it."""
    assert found(0.9, kind="Sigmoid", after=False) == []
    assert [finding.site for finding in found(0.8, 0.9, after=False)] == ["a0:out"]


def test_what_follows_in_another_root_does_not_count():
    """A criterion is no layer of the model."""
    rows = [size(step, "D:out", 0.9) | {"sampled": 10, "saturated": 9} for step in range(20)]
    sites = [{"site": "D:out", "type": "Sigmoid"}, {"site": "Loss:out", "root": 1}]

    assert list(Saturated().check(Recording.build(sites, rows))) == []


def test_what_was_not_measured_is_not_judged():
    """Neither without drawn elements nor in steps that were not finite."""
    assert found(0.9, sampled=-1, saturated=-1) == []
    assert found(0.9, sampled=0, saturated=0) == []
    assert found(0.9, nonfinite=1) == []


def test_roots_are_judged_one_by_one():
    """Each has its first."""
    rows = [
        size(s, n, 0.9) | {"sampled": 10, "saturated": 9}
        for s in range(20)
        for n in ("G.a:out", "D.a:out")
    ]
    sites = [
        {"site": n, "type": "Tanh", "root": i // 2}
        for i, n in enumerate(("G.a:out", "G.b:out", "D.a:out", "D.b:out"))
    ]

    assert [f.site for f in Saturated().check(Recording.build(sites, rows))] == [
        "G.a:out",
        "D.a:out",
    ]


@golden("SATURATED")
def golden_saturated(*, fires: bool) -> Golden:
    """Drive two thirds of a hidden tanh to its ends, or a third."""
    rows = [
        size(step, "tanh:out", 0.9) | {"sampled": 30, "saturated": 20 if fires else 10}
        for step in range(10)
    ]
    rows += [size(step, "head:out", 0.9) for step in range(10)]
    return {
        "roots": [],
        "sites": [{"site": "tanh:out", "type": "Tanh"}, {"site": "head:out"}],
        "rows": rows,
    }
