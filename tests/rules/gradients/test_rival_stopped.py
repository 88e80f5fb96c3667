"""RIVAL-STOPPED: one of two adversaries that hardly gets a gradient any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kedge.rules.gradients.rival_stopped import RivalStopped
from kedge.rules.rule import Finding
from tests.rules.goldens import Golden, golden, written
from tests.rules.scenes import Course, size, steady

STEPS = range(0, 600, 10)
Norm = Callable[[int], float]


def level(value: float) -> Norm:
    """Return a norm that stays within a factor of two."""
    return lambda i: value * (1 + i % 3 / 2)


def falls(value: float, to: float) -> Norm:
    """Return a norm that falls after a third of the run."""
    return lambda i: (value if i < len(STEPS) // 3 else to) * (1 + i % 3 / 2)


def made(generator: Norm, critic: Norm, *, apart: bool = True, joined: bool = True) -> Course:
    """Make two models with such norms of their gradients.

    Args:
        generator: The norm of the one.
        critic: The norm of the other one.
        apart: Whether each has an optimizer of its own.
        joined: Whether the latter was given the output of the former.
    """
    course = Course(STEPS)
    course.roots = [
        {"name": "Generator", "prefix": "", "parameters": 16, "trained": True, "optimizers": [0]},
        {"name": "Critic", "prefix": "D", "parameters": 16, "trained": True, "optimizers": [0]},
    ]
    if apart:
        course.roots[1]["optimizers"] = [1]
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.weight("D.fc", steady(0.1, 1e-3, 1e-4), root=1)
    for i, site in enumerate(course.sites):
        site["id"] = i
    source = 0 if joined else None
    entries: list[dict[str, Any]] = [
        {"site": "D:in", "path": "D", "kind": "in", "root": 1, "from": [source]},
        {"site": ":grad.norm", "path": "", "kind": "grad.norm", "root": 0},
        {"site": "D:grad.norm", "path": "D", "kind": "grad.norm", "root": 1},
    ]
    course.sites += [{**entry, "id": len(course.sites) + i} for i, entry in enumerate(entries)]
    for i, step in enumerate(STEPS):
        course.rows.append(size(step, ":grad.norm", generator(i), count=1))
        course.rows.append(size(step, "D:grad.norm", critic(i), count=1))
    return course


def found(*norms: Norm, **entry: Any) -> list[Finding]:
    """Run the rule."""
    return list(RivalStopped().check(made(*norms, **entry).recording()))


def test_a_generator_without_gradients_is_found():
    """The other one went on; the step is the last one before."""
    (finding,) = found(falls(2.0, 2e-3), level(1.0))

    assert (finding.severity, finding.site, finding.step) == ("warning", ":grad.norm", 190)
    assert finding.message == (
        "The gradients of Generator fell from a norm of 3 to 0.003, and were last above a hundredth of "
        "it in step 190; those of Critic, which trains with it, went on (1.5, and 1.5 at the end). "
        "Generator hardly learns any more."
    )


def test_a_critic_without_gradients_is_found_too():
    """It may be sure of everything."""
    (finding,) = found(level(1.0), falls(2.0, 2e-3))

    assert finding.site == "D:grad.norm"
    assert finding.message.startswith("The gradients of Critic fell")


def test_a_critic_that_is_given_data_before_what_is_generated_is_a_rival():
    """Its input comes from two places, the data set first."""
    course = made(falls(2.0, 2e-3), level(1.0))
    (critic,) = (site for site in course.sites if site["site"] == "D:in")
    critic["from"] = [None, *critic["from"]]

    assert [finding.site for finding in RivalStopped().check(course.recording())] == [":grad.norm"]


@pytest.mark.parametrize(
    ("generator", "critic", "entry"),
    [
        (level(2.0), level(1.0), {}),
        (falls(2.0, 0.1), level(1.0), {}),
        (falls(2.0, 2e-3), falls(1.0, 0.05), {}),
        (falls(200.0, 0.5), level(1.0), {}),
        (falls(2.0, 0.0), level(1.0), {}),
        (falls(2.0, 2e-3), level(1.0), {"apart": False}),
        (falls(2.0, 2e-3), level(1.0), {"joined": False}),
    ],
    ids=[
        "both go on",
        "a twentieth",
        "both stop",
        "from too much",
        "exactly zero",
        "one optimizer",
        "two models",
    ],
)
def test_what_is_healthy_or_another_fault_is_no_finding(
    generator: Norm, critic: Norm, entry: dict[str, Any]
):
    """Either goes on, falls from an unusual height, or has nothing to do with the other one."""
    assert found(generator, critic, **entry) == []


def test_a_program_without_adversaries_has_nothing_to_judge():
    """The verdict says so."""
    recording = made(level(1.0), level(1.0), joined=False).recording()

    assert RivalStopped().idle(recording) == "no adversaries"
    assert RivalStopped().lacking(recording) is None
    assert RivalStopped().idle(made(level(1.0), level(1.0)).recording()) == ""


@golden("RIVAL-STOPPED")
def golden_rival_stopped(*, fires: bool) -> Golden:
    """Let the gradients of a generator fall, or go on."""
    generator = level(2.0)
    if fires:
        generator = falls(2.0, 2e-3)
    return written(made(generator, level(1.0)))
