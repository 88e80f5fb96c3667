"""The tensors held over a step, as a recording has them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kedge.json_input.shape import Misshapen
from kedge.store.events import SavedEvent, event_from
from kedge.store.held_tensors import HeldSpan, HeldTensors, TensorKind, limited
from kedge.store.saved_account import BytesOverStep, SavedAccount, Sums

HELD = HeldTensors(
    (
        TensorKind("a.0", "ExpBackward0", "result", (2, 3), "float32", "made", "net.py:3"),
        TensorKind(None, None, None, (), "int64", "input", None),
        TensorKind("a.1", "ExpBackward0", "result", (2, 3), "float32", "made", "net.py:3"),
    ),
    (HeldSpan(0, 1, 24, 0, 2), HeldSpan(1, 2, 16, 1, 4), HeldSpan(2, 1, 24, 1, 3)),
)


def line(held: HeldTensors = HELD) -> dict[str, Any]:
    """Return the event of a recording with these tensors, as it is read again."""
    course = BytesOverStep((24, 64, 40, 16), (1, 3, 4, 6), 64, 3, 4, (), (0.0, 0.1, 0.2, 0.3), held)
    account = SavedAccount(Sums(None, 4, 64, 64), 0, 16, (), (), (), (), course)
    entry: dict[str, Any] = json.loads(json.dumps(SavedEvent.of(account, step=0).entry()))
    return entry


def account_of(line: dict[str, Any]) -> SavedAccount:
    """Return the account in a line of a recording."""
    event = event_from(line)
    assert isinstance(event, SavedEvent)
    assert event.account is not None
    return event.account


def test_they_are_read_as_they_were_written() -> None:
    """Each text stands once; the event has the shape that readers check."""
    written = line()
    account = account_of(written)

    assert account.course.tensors == HELD
    assert account.course.seconds == (0.0, 0.1, 0.2, 0.3)
    assert written["course"]["tensors"]["node"] == ["ExpBackward0", None]


def test_a_recording_from_before_has_none() -> None:
    """A reader finds the bytes over the step, and no tensors."""
    written = line()
    del written["course"]["tensors"], written["course"]["seconds"]
    account = account_of(written)

    assert not account.course.tensors
    assert not HeldTensors.from_json(None)
    assert account.course.bytes == (24, 64, 40, 16)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("kinds", [[0, 0, 0, 0, 0, 0, 9]], r"course\.tensors\.kinds has a number without a text"),
        ("kinds", [[0, 0]], r"course\.tensors\.kinds has a number without a text"),
        ("spans", [[7, 1, 24, 0, 2]], r"course\.tensors\.spans has one without a kind"),
        ("spans", [[0, 1, 24, 2, 2]], r"course\.tensors\.spans has one without a kind"),
        ("spans", [[0, 1, 24, 0, 9]], "outside of the 4 moments"),
        (
            "spans",
            [[0, 1, 24, 0]],
            r"course\.tensors\.spans\[0\] is a list but must be a list of 5",
        ),
        ("rest", [1], r"course\.tensors\.rest has 1 sizes at 4 moments"),
        ("shape", [["x"]], r"course\.tensors\.shape\[0\]\[0\] is 'x'"),
    ],
)
def test_what_does_not_fit_together_is_an_error(place: str, value: Any, said: str) -> None:
    """A number without a text, a span of no kind or outside of the step: the error names the key."""
    written = line()
    written["course"]["tensors"][place] = value

    with pytest.raises(Misshapen, match=said):
        event_from(written)


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_of_too_many_the_largest_are_listed_and_the_others_added_up(most: int) -> None:
    """The bytes at each moment stay the same, and kinds that no span has are left out."""
    few = limited(HELD, 4, most)

    assert [few.bytes(moment) for moment in range(4)] == [HELD.bytes(moment) for moment in range(4)]
    assert len(few.spans) == most
    assert {few.kinds[span.kind] for span in few.spans} == set(few.kinds)
    assert account_of(line(few)).course.tensors == (few or HeldTensors())
