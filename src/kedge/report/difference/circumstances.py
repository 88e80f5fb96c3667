"""In what circumstances two recordings differ: what was typed, and on what it ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from kedge.store.recording import Recording

#: What of a manifest is compared.
KEYS = ("torch", "device", "python", "kedge", "world")


@dataclass(frozen=True)
class Circumstance:
    """One thing that is different: what it is, and how it is in A and in B."""

    name: str
    a: str
    b: str


def circumstances(a: Recording, b: Recording) -> tuple[Circumstance, ...]:
    """List what is different: the words that were typed, versions, the device."""
    typed = (_words(a), _words(b))
    found = [Circumstance("command", " ".join(one), " ".join(other)) for one, other in _changes(*typed)]
    for key in KEYS:
        one, other = a.manifest.get(key), b.manifest.get(key)
        if one is not None and other is not None and one != other:
            found.append(Circumstance(key, str(one), str(other)))
    return tuple(found)


def _words(recording: Recording) -> list[str]:
    return [str(word) for word in recording.manifest.get("command") or ()]


def _changes(a: Sequence[str], b: Sequence[str]) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Give the words that differ; an option goes with the value that follows it."""
    for tag, a1, a2, b1, b2 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            option = a1 > 0 and b1 > 0 and a[a1 - 1].startswith("-")
            yield a[a1 - option : a2], b[b1 - option : b2]
