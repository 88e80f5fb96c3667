"""What a finding rests on: how it is written, said and drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

import kedge
from kedge.errors import WrongCall
from kedge.rules.evidence import (
    Evidence,
    LeadUp,
    SiteCourse,
    axis,
    curve,
    places,
    said,
    said_share,
    unsaid,
)


@dataclass(frozen=True, kw_only=True)
class Everything(Evidence):
    """Evidence with each kind of field."""

    height: float = said("height {}")
    births: int = said("at {} places", least=2)
    back: bool = said("it came back", no="it did not come back")
    share: float = said_share("a share of {}")
    again: Sequence[str] = said("again {}", unless=())
    hidden: str = unsaid()
    bar: float | None = said("the limit is {}", limit="limit")
    steps: Sequence[int] = axis("steps {}")
    course: Sequence[float | None] = curve()
    shares: Mapping[str, float] = places("share at each site")
    own_name: int


MADE = Everything(
    height=2.5,
    births=1,
    back=True,
    share=0.25,
    hidden="h",
    bar=4.0,
    steps=[1, 2],
    course=[1.0, None],
    shares={"a": 1.0},
    own_name=1200,
)
FOUND = kedge.Finding(
    code="X", severity="error", site="a:out", step=0, message="So.", evidence=MADE
)


def test_a_finding_is_written_with_its_fields_in_order():
    """What is left out has its default; the ranks and the cause come last."""
    written = replace(FOUND, ranks=(0, 2), follows="SPIKE").entry()

    assert list(written) == [
        "code",
        "severity",
        "site",
        "step",
        "message",
        "evidence",
        "confidence",
        "remedy",
    ]
    assert list(written["evidence"].items()) == [
        ("height", 2.5),
        ("births", 1),
        ("back", True),
        ("share", 0.25),
        ("hidden", "h"),
        ("bar", 4.0),
        ("steps", [1, 2]),
        ("course", [1.0, None]),
        ("shares", {"a": 1.0}),
        ("own_name", 1200),
        ("ranks", [0, 2]),
        ("follows", "SPIKE"),
    ]


def test_a_finding_without_evidence_has_none():
    """Its evidence is empty, in JSON and in words."""
    bare = replace(FOUND, evidence=Evidence())

    assert (bare.entry()["evidence"], bare.words()) == ({}, [])


def test_evidence_is_said_in_its_own_words():
    """A field without words is written with its name, and what the figure shows is not written."""
    assert replace(FOUND, ranks=(0, 2), follows="SPIKE").words() == [
        "height 2.50",
        "it came back",
        "a share of 25.0 %",
        "the limit is 4.00",
        "steps 1, 2",
        "own name: 1,200",
        "ranks: 0, 2",
        "it follows from SPIKE",
    ]


def test_a_number_is_said_from_its_least_on_and_a_no_has_its_words():
    """One birth is not worth a word."""
    other = replace(MADE, births=2, back=False, again=["b"])

    assert {"at 2 places", "it did not come back", "again b"} <= {*other.words()}


def test_long_lists_are_not_said():
    """Eight names are read, more are not."""
    assert "steps 0, 1, 2, 3, 4, 5, 6, 7" in replace(MADE, steps=range(8)).words()
    assert not any(word.startswith("steps") for word in replace(MADE, steps=range(9)).words())


def test_evidence_says_what_can_be_drawn():
    """Curves with their steps, limits, and figures of several places."""
    assert (MADE.axis(), MADE.curves()) == ((1, 2), {"course": [1.0, None]})
    assert MADE.limits() == {"limit": 4.0}
    assert [(each.caption, each.preferred, each.figures) for each in MADE.places()] == [
        ("share at each site", False, {"a": 1.0})
    ]
    assert (MADE.lead_up(), Evidence().axis()) == (None, ())


def test_the_steps_before_are_empty_without_a_site():
    """So that a reader of the JSON asks for one thing."""
    course = SiteCourse(rms=[1.0], absmax=[2.0], state=["finite"])

    assert LeadUp().to_json() == {}
    assert LeadUp([3], {"a:out": course}).to_json() == {
        "steps": [3],
        "sites": {"a:out": {"rms": [1.0], "absmax": [2.0], "state": ["finite"]}},
    }


def test_evidence_without_fields_is_refused_with_what_to_do():
    """A dict would be read by names that nothing checks."""
    with pytest.raises(WrongCall, match="a dict has no fields; make a dataclass that is"):
        kedge.Finding(
            code="X", severity="error", site="a", step=0, message="So.", evidence={"a": 1}
        )
