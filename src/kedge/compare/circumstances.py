"""Differences in the circumstances of two recordings: the commands, versions and devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from kedge.shown_text import visible
from kedge.store.recording import Recording

#: The keys of a manifest that are compared.
KEYS = ("torch", "device", "python", "kedge", "world")


@dataclass(frozen=True)
class Circumstance:
    """One difference: its name, and the value in A and in B."""

    name: str
    a: str
    b: str


def circumstances(a: Recording, b: Recording) -> tuple[Circumstance, ...]:
    """Return the differences: words of the commands, versions, the device."""
    found = []
    for words, others in _changes(_words(a), _words(b)):
        found.append(Circumstance("command", " ".join(words), " ".join(others)))
    for key in KEYS:
        one = a.manifest.get(key)
        other = b.manifest.get(key)
        if one is not None and other is not None and one != other:
            found.append(Circumstance(key, str(one), str(other)))
    return tuple(found)


def _words(recording: Recording) -> list[str]:
    command = recording.manifest.get("command") or ()
    return [visible(str(word), lines=True) for word in command]


def _changes(
    a: Sequence[str],
    b: Sequence[str],
) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Yield the words that differ; an option belongs to the value that follows it."""
    for a1, a2, b1, b2 in _places(a, b):
        option = a1 > 0 and b1 > 0 and a[a1 - 1].startswith("-")
        yield a[a1 - option : a2], b[b1 - option : b2]


def _places(a: Sequence[str], b: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    """Yield where differing words begin and end in either.

    Commands of the same length are compared word by word.
    """
    if len(a) == len(b):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            if one != other:
                yield i, i + 1, i, i + 1
        return
    for tag, *places in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            a1, a2, b1, b2 = places
            yield a1, a2, b1, b2
