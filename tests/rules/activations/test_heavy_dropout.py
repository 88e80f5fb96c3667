"""HEAVY-DROPOUT: the share to keep given as the share to drop."""

from __future__ import annotations

from typing import Any

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


def seen_behind_the_loss(step: int, *dropouts: dict[str, Any]) -> dict[str, Any]:
    """Describe what the graph of a loss shows of dropouts."""
    return {"kind": "dropouts", "step": step, "site": "loss", "dropouts": list(dropouts)}


def test_a_function_that_drops_nearly_all_is_named_by_its_line():
    """The lines come later than the shares; the step is that in which the dropout was first seen."""
    made = Course(SAMPLES[:6])
    made.weight("fc", steady(0.1, 1e-3, 1e-4))
    line = {"file": "net.py", "line": 7, "function": "forward", "text": "F.dropout(x, 0.95)"}
    made.events = [
        seen_behind_the_loss(0, {"kept": 0.05}, {"kept": 0.9}),
        seen_behind_the_loss(3, {"kept": 0.05, "source": line}, {"kept": 0.9, "source": line}),
    ]

    (finding,) = found(made)

    assert (finding.severity, finding.site, finding.step) == ("warning", "loss", 0)
    assert finding.message == "A dropout at net.py:7 lets 5.0% of its input through."
    assert finding.evidence.kept == 0.05
    assert finding.evidence.source.line == 7
    assert finding.remedy.startswith("Give functional.dropout the share to drop")


def test_functions_are_left_to_the_modules_that_call_them():
    """nn.Dropout calls the function: it is one dropout, and one finding."""
    made = course(0.05)
    made.events = [seen_behind_the_loss(0, {"kept": 0.05})]

    assert [finding.site for finding in found(made)] == ["drop:out"]


@golden("HEAVY-DROPOUT")
def golden_heavy_dropout(*, fires: bool) -> Golden:
    """Drop 95 % or a half."""
    return written(course(0.05 if fires else 0.5))
