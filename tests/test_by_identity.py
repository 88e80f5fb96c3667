"""Entries by identity."""

from __future__ import annotations

from kedge.by_identity import ByIdentity


class Odd:
    """An object that is equal to all others, and has no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


def test_objects_are_told_apart_whatever_they_say() -> None:
    """Each has its own entry, as long as it exists."""
    a, b = Odd(), Odd()
    entries: ByIdentity[Odd, str] = ByIdentity()
    entries.update([(a, "a"), (b, "b")])
    assert (entries[a], entries[b], len(entries)) == ("a", "b", 2)
    entries[a] = "c"
    assert entries.pop(a) == "c"
    assert a not in entries
    del b
    assert len(entries) == 0
