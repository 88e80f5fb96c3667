"""HEAVY-DROPOUT: the share to keep given as the share to drop."""

from __future__ import annotations

import pytest

from kedge.rules.activations.heavy_dropout import HeavyDropout
from kedge.rules.rule import Finding
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, size, steady


def course(kept: float, *, given: float = 1.0, kind: str = "Dropout", steps: int = 6) -> Course:
    """Make a module that lets a share of its input through; the input has a share other than zero."""
    made = Course(SAMPLES[:steps])
    made.weight("fc", steady(0.1, 1e-3, 1e-4))
    for end, share in (("in", given), ("out", given * kept)):
        made.sites.append({"site": f"drop:{end}", "type": kind, "shape": [10, 100]})
        for step in made.steps:
            row = {**size(step, f"drop:{end}", 1.0, 1000), "nonzero": round(1000 * share)}
            made.rows.append(row)
    made.roots[0]["trained"] = True
    return made


def found(made: Course) -> list[Finding]:
    """Run the rule."""
    return list(HeavyDropout().check(made.recording()))


def test_a_dropout_that_leaves_next_to_nothing_is_a_warning():
    """The share is that of what it got: zeros of a relu before it do not count."""
    (finding,) = found(course(0.05, given=0.4))

    assert (finding.severity, finding.site) == ("warning", "drop:out")
    assert finding.message == "drop (Dropout) lets 5.0% of its input through, in 6 measured steps."


@pytest.mark.parametrize(
    "made",
    [
        course(0.2),
        course(1.0, given=0.05),
        course(0.05, kind="ReLU"),
        course(0.05, steps=4),
        course(0.0, given=0.0),
    ],
    ids=["usual", "a sparse input", "no dropout", "too few steps", "nothing given"],
)
def test_what_is_usual_is_no_finding(made):
    """Published models drop up to 0.8."""
    assert found(made) == []


@golden("HEAVY-DROPOUT")
def golden_heavy_dropout(*, fires: bool) -> Golden:
    """Drop 95 % or a half."""
    return written(course(0.05 if fires else 0.5))
