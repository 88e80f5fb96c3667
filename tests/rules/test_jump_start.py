"""Where a jump begins: the first value that jumped while what it was made from did not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kedge.rules.gradients.grad_explode import GradExplode
from kedge.rules.recorded.jump_start import JumpStart, jump_start
from kedge.rules.training.spike import Spike
from kedge.store.recording import Recording

SITES: list[dict[str, Any]] = [
    {"site": ":in", "path": "", "from": [None]},
    {"site": "a:in", "path": "a", "from": [None]},
    {"site": "a:out", "path": "a"},
    {"site": "b:in", "path": "b", "from": [2]},
    {"site": "b:out", "path": "b"},
    {"site": "c:in", "path": "c", "from": [None]},
    {"site": "c:out", "path": "c"},
    {"site": "c:out.grad", "path": "c"},
    {"site": "b:out.grad", "path": "b"},
    {"site": "a:out.grad", "path": "a"},
    {"site": "a.weight:param.grad", "owner": "a"},
    {"site": "b.weight:param.grad", "owner": "b"},
    {"site": "c.weight:param.grad", "owner": "c"},
]
TEXTS = [site["site"] for site in SITES]
JUMP = 60


def rows(times: dict[str, float], measured: range, jump: int = JUMP) -> list[dict[str, Any]]:
    """Return rows in which some sites jump, up or down from a course that wanders a little."""
    found = []
    for step in measured:
        for site in TEXTS:
            rms = 1.0 + 0.1 * math.sin(step)
            if step == jump:
                rms *= times.get(site, 1.1)
            found.append({"step": step, "site": site, "count": 16, "sumsq": 16 * rms**2})
    return found


def start(times: dict[str, float], **options: Any) -> JumpStart | None:
    """Return where a jump begins whose sites are so many times as large."""
    measured = range(0, 100, options.pop("every", 10))
    recording = Recording.build(SITES, rows(times, measured), roots=[{"name": "Net"}])
    steps = np.array([JUMP])
    return jump_start(recording, {0}, steps, backward=options.pop("backward", True))


def all_after(site: str, times: float) -> dict[str, float]:
    """Return that a site and all after it jumped."""
    return dict.fromkeys(TEXTS[TEXTS.index(site) :], times)


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (":in", "data"),
        ("a:out", "output"),
        ("c:in", "input"),
        ("c:out", "output"),
        ("c:out.grad", "loss"),
        ("a:out.grad", "gradient"),
        ("a.weight:param.grad", "parameter"),
    ],
)
def test_a_jump_begins_at_the_first_value_that_jumped(first: str, kind: str) -> None:
    """It is told from which code it comes: the data, a module, the code between two, or backward."""
    found = start(all_after(first, 40.0))

    assert found is not None
    assert (found.site, found.kind, found.step, found.steps) == (first, kind, JUMP, 6)
    assert found.times == pytest.approx(38.6, rel=0.1)


def test_what_is_seen_is_said() -> None:
    """With the factor of the value, and that of what it was made from."""
    assert str(start(all_after("a:out", 40.0))) == (
        "At step 60 a:out was the first output that jumped, to 39.3 times its median of the 6 "
        "measured steps before; what its module was given was 1.08 times its own."
    )
    assert str(start(all_after(":in", 40.0))) == (
        "At step 60 the values that the model was given (:in) were themselves 39.3 times their "
        "median of the 6 measured steps before: the jump is in the batch."
    )
    assert str(start(all_after("c:out.grad", 40.0))) == (
        "At step 60 no output had jumped; the first gradient of the backward pass (c:out.grad) was "
        "already 39.3 times its median of the 6 measured steps before."
    )
    assert str(start(all_after("b:out.grad", 40.0))) == (
        "At step 60 no output had jumped; b:out.grad was the first gradient in the backward pass "
        "that did, to 39.3 times its median of the 6 measured steps before; those before it in the "
        "pass were at most 1.08 times theirs."
    )
    assert str(start(all_after("a.weight:param.grad", 40.0))) == (
        "At step 60 no output and no gradient of one had jumped; a.weight:param.grad was 39.3 "
        "times its median of the 6 measured steps before, like 2 more: it was changed where "
        "gradients of parameters are summed or exchanged."
    )


def test_of_parameters_the_one_that_jumped_farthest_is_named() -> None:
    """Others that jumped less than half as far are not counted."""
    found = start({"a.weight:param.grad": 11.5, "b.weight:param.grad": 400.0})

    assert found is not None
    assert (found.site, found.alike) == ("b.weight:param.grad", 0)


@pytest.mark.parametrize(
    ("times", "options"),
    [
        ({}, {}),
        (dict.fromkeys(TEXTS, 3.0), {}),
        (all_after("a:out", 40.0), {"every": 7}),
        (all_after("a:out", 40.0), {"every": 20}),
        (all_after("c:out.grad", 40.0), {"backward": False}),
        (all_after("c:out.grad", 8.0), {}),
        ({"c:in": 3.0, "c:out": 4.5}, {}),
    ],
    ids=["no jump", "small", "not measured", "few before", "only forward", "noise", "not there"],
)
def test_what_was_not_seen_is_not_said(times: dict[str, float], options: dict[str, Any]) -> None:
    """A jump between measured steps, with few of them before, or of values that hardly differ."""
    assert start(times, **options) is None


@pytest.mark.parametrize("kinds", [("out", "in"), ("out.grad",)])
def test_of_what_nobody_saw_it_is_not_said_that_it_did_not_jump(kinds: tuple[str, ...]) -> None:
    """A gradient of a parameter says nothing without the outputs, or their gradients."""
    measured = rows(all_after("a.weight:param.grad", 40.0), range(0, 100, 10))
    seen = [row for row in measured if not row["site"].endswith(tuple(f":{k}" for k in kinds))]
    recording = Recording.build(SITES, seen, roots=[{"name": "Net"}])

    assert jump_start(recording, {0}, np.array([JUMP]), backward=True) is None


def with_course(kind: str, times: dict[str, float], last: int) -> Recording:
    """Return a recording whose loss or norm jumps at step 59, and stays up to a step."""
    site = {"loss": {"site": "loss", "root": -1}, "norm": {"site": ":grad.norm"}}[kind]
    course = []
    for step in range(100):
        value = 1.0 + 0.1 * math.sin(step)
        if JUMP - 1 <= step <= last:
            value *= 500
        row = {"step": step, "site": site["site"], "count": 1, "sum": value, "sumsq": value**2}
        course.append({**row, "level": 1})
    sites = [*SITES, {**site, "shape": []}]
    measured = rows(times, range(0, 100, 2))
    return Recording.build(sites, [*measured, *course], roots=[{"name": "Net", "trained": True}])


@pytest.mark.parametrize("kind", ["loss", "norm"])
def test_a_spike_is_told_with_its_start_if_a_measured_step_is_in_it(kind: str) -> None:
    """Its first measured step may be a later one."""
    (finding,) = Spike().check(with_course(kind, all_after("a:out", 40.0), JUMP))

    assert finding.step == JUMP - 1
    assert finding.message.endswith(f" {finding.evidence.begins}")
    assert finding.evidence.begins.site == "a:out"
    assert finding.remedy.startswith("Look at the weights and buffers of that module")


@pytest.mark.parametrize("kind", ["loss", "norm"])
def test_a_spike_between_measured_steps_is_told_without(kind: str) -> None:
    """Nothing is said of values that nobody saw."""
    (finding,) = Spike().check(with_course(kind, all_after("a:out", 40.0), JUMP - 1))

    assert finding.evidence.begins is None
    assert finding.message.endswith("it came back.")
    assert "begins" not in finding.entry()["evidence"]


def test_of_a_loss_only_the_forward_is_looked_at() -> None:
    """Gradients follow from it."""
    (finding,) = Spike().check(with_course("loss", all_after("c:out.grad", 40.0), JUMP))

    assert finding.evidence.begins is None


def exploding(growth: float) -> Recording:
    """Return a recording whose gradients grow by a factor a step up to a hundredfold, from step 60 on, and stay there."""
    found = []
    for step in range(100):
        size = 1.0 + 0.1 * math.sin(step)
        if step >= JUMP:
            size *= min(growth ** (step - JUMP + 1), 100)
        for site in TEXTS:
            rms = size if site in {"a:out.grad", "a.weight:param.grad"} else 1.0
            found.append({"step": step, "site": site, "count": 16, "sumsq": 16 * rms**2})
    return Recording.build(SITES, found, roots=[{"name": "Net", "trained": True}])


def test_gradients_that_jump_and_stay_are_told_with_their_start() -> None:
    """The backward of the module that follows made them."""
    (finding,) = GradExplode().check(exploding(100))

    assert finding.evidence.begins.site == "a:out.grad"
    assert finding.message.endswith(f" {finding.evidence.begins}")


def test_gradients_that_grow_have_no_start() -> None:
    """Not a step but a course is to be looked at."""
    (finding,) = GradExplode().check(exploding(1.5))

    assert finding.evidence.begins is None
