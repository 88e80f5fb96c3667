"""MOSTLY-FROZEN: fresh layers that do not train."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.rules.parameters.mostly_frozen import MostlyFrozen
from kedge.rules.rule import Finding
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, steady

PARTS = [
    {"path": "emb", "elements": 200, "frozen": 200},
    {"path": "body", "elements": 700, "frozen": 700},
    {"path": "neck", "elements": 50, "frozen": 10},
    {"path": "head", "elements": 50, "frozen": 0},
]


def made(**entry: Any) -> Course:
    """Make a healthy course of a head, beside a body that is frozen."""
    course = Course(SAMPLES[:5])
    course.weight("head", steady(0.1, 1e-3, 1e-4))
    course.roots[0]["trained"] = True
    frozen = {
        "kind": "frozen",
        "step": 0,
        "root": 0,
        "frozen": 910,
        "elements": 1000,
        "weights": 900,
        "even": 700,
        "parts": PARTS,
    }
    course.events = [{**frozen, **entry}]
    return course


def found(**entry: Any) -> list[Finding]:
    """Run the rule."""
    return list(MostlyFrozen().check(made(**entry).recording()))


def test_fresh_layers_that_do_not_train_are_named():
    """With what trains beside them, as a hint."""
    (finding,) = found()

    assert (finding.severity, finding.site, finding.step) == ("info", ":out", 0)
    assert finding.message == (
        "91.0 % of Net is frozen (910 of 1,000 elements have requires_grad False): all of body, emb, "
        "a part of neck. Most of these weights are spread evenly, as PyTorch draws those of a fresh "
        "layer and as training does not leave them. What trains is in neck, head."
    )


@pytest.mark.parametrize(
    "entry",
    [
        {"even": 300},  # a pretrained model
        {"even": 0, "weights": 0},  # nothing was judged
        {"frozen": 500},
        {"beside": 600},  # adapters
    ],
)
def test_what_is_meant_is_no_finding(entry: dict[str, Any]):
    """As far as it can be told: trained weights, half a model, and adapters."""
    assert found(**entry) == []


def test_a_part_that_got_gradients_later_is_no_finding():
    """It was frozen for a stage only."""
    assert found(parts=[{"path": "head", "elements": 910, "frozen": 910}]) == []


@golden("MOSTLY-FROZEN", lacks=(0, 1))
def golden_mostly_frozen(*, fires: bool) -> Golden:
    """Freeze layers as they were drawn, or trained ones."""
    even = 0
    if fires:
        even = 700
    return written(made(even=even))
