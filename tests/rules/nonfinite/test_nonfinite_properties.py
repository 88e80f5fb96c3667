"""NAN-BORN on models of any wiring: the one that was made to fail is the one that is named."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.rules.nonfinite.nan_born import NanBorn
from tests.rules.scenes import FINITENESS, FULL, NAN, Scene, all_of


@dataclass(frozen=True)
class Plan:
    """A wiring, who fails in it, and what of the failing step is recorded."""

    sources: list[list[int]]
    producer: int
    level: int
    hidden: set[int]
    value: float


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Wire some modules to earlier ones; the last one is what the model returns."""
    number = draw(st.integers(1, 9))
    sources = [
        sorted(draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=2))) if i else []
        for i in range(number)
    ]
    return Plan(
        sources=sources,
        producer=draw(st.integers(0, number - 1)),
        level=draw(st.sampled_from([FULL, FINITENESS])),
        hidden=draw(st.sets(st.integers(0, number - 1))),
        value=draw(st.sampled_from([NAN, math.inf, -math.inf])),
    )


def spread(plan: Plan) -> set[int]:
    """Follow what the producer makes through all that take it in."""
    bad = {plan.producer}
    for i, sources in enumerate(plan.sources):
        if bad.intersection(sources):
            bad.add(i)
    return bad


def build(plan: Plan) -> Scene:
    """Record two healthy steps and the one that fails; off schedule, hidden inputs are left out."""
    scene = Scene()
    scene.open("", "Net")
    for i, sources in enumerate(plan.sources):
        scene.module(f"m{i}", of=[f"m{s}" for s in sources] or [None], weight=True)
    scene.close("", "Net")
    bad = spread(plan)
    sites = [f"m{i}:out" for i in bad] + [
        f"m{i}:in" for i, s in enumerate(plan.sources) if bad.intersection(s)
    ]
    if len(plan.sources) - 1 in bad:
        sites += [
            ":out",
            *(s["site"] for s in scene.sites if s["site"].endswith((":out.grad", ":param.grad"))),
        ]
    scene.step(0)
    scene.step(10)
    unseen = (
        [f"m{i}:in" for i in plan.hidden if plan.sources[i]] if plan.level == FINITENESS else []
    )
    scene.step(17, all_of(sites, plan.value), level=plan.level, without=unseen)
    return scene


@settings(deadline=None)
@given(plans())
def test_the_producer_is_the_only_one_named(plan):
    """Whatever the wiring and whatever of it is recorded, nobody who passed it on is blamed.

    An infinity that reaches neither the returned value nor a gradient is nobody's fault.
    """
    findings = list(NanBorn().check(build(plan).recording()))

    reached = len(plan.sources) - 1 in spread(plan)
    assert [finding.site for finding in findings] == (
        [f"m{plan.producer}:out"] if reached or plan.value is NAN else []
    )
    assert all(finding.severity == ("error" if reached else "warning") for finding in findings)


@settings(deadline=None)
@given(plans(), st.integers(1, 30))
def test_what_follows_changes_nothing(plan, steps):
    """Any number of later steps in which everything is NaN leaves the finding as it is."""
    scene, longer = build(plan), build(plan)
    if len(plan.sources) - 1 not in spread(plan):
        return
    for step in range(20, 20 + steps):
        longer.step(step, all_of((site["site"] for site in longer.sites), NAN))

    assert list(NanBorn().check(longer.recording())) == list(NanBorn().check(scene.recording()))
