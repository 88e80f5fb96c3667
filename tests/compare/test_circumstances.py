"""In what circumstances two recordings differ."""

from __future__ import annotations

import pytest

from kedge.compare.circumstances import circumstances
from kedge.store.recording import Recording


def told(a: list[str], b: list[str]) -> list[tuple[str, str]]:
    """What differs in two commands."""
    runs = [Recording.build(manifest={"command": words}) for words in (a, b)]
    return [(found.a, found.b) for found in circumstances(*runs)]


@pytest.mark.parametrize(
    ("a", "b", "differences"),
    [
        (["t.py", "--lr", "1"], ["t.py", "--lr", "1"], []),
        (["t.py", "--lr", "1"], ["t.py", "--lr", "2"], [("--lr 1", "--lr 2")]),
        (["t.py", "--lr=1", "x"], ["t.py", "--lr=2", "x"], [("--lr=1", "--lr=2")]),
        (["t.py", "0", "0"], ["t.py", "1", "0"], [("0", "1")]),
        (["t.py"], ["t.py", "--fast"], [("", "--fast")]),
        (["t.py", "--seed", "1", "--fast"], ["t.py", "--seed", "1"], [("--fast", "")]),
        (["a.py", "--lr", "1", "x"], ["b.py", "--lr", "1", "y"], [("a.py", "b.py"), ("x", "y")]),
    ],
)
def test_the_words_that_differ_are_shown(
    a: list[str], b: list[str], differences: list[tuple[str, str]]
) -> None:
    """An option is shown with its value, and what both have is not shown."""
    assert told(a, b) == differences


def test_versions_and_devices_are_shown() -> None:
    """What both manifests name and is not the same; what one leaves out is no difference."""
    a = Recording.build(manifest={"torch": "2.12.0", "device": "cpu", "python": "3.11.7"})
    b = Recording.build(manifest={"torch": "2.13.0", "device": "cpu", "world": 2})

    assert [(c.name, c.a, c.b) for c in circumstances(a, b)] == [("torch", "2.12.0", "2.13.0")]
