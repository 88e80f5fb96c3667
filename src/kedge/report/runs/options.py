"""The options of several runs: the words of their commands, and where the runs differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.shown_text import visible

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_SET = re.compile(r"[+~]{0,2}([A-Za-z_][\w./-]*)=(.*)", re.DOTALL)


def options_of(command: Sequence[Any]) -> dict[str, str]:
    """Return the options of a command by name.

    A value follows its option as a word, as several words, or after ``=``; an option without one is
    ``yes``. A word such as ``lr=0.1`` by itself is an option too, and any other word is called by
    its place: ``argument 1``.

    Args:
        command: The program and its arguments.
    """
    words = [visible(str(word), lines=True) for word in command[1:]]
    found: dict[str, list[str]] = {}
    for name, value in _pairs(words):
        found.setdefault(name, []).extend(value)

    options = dict.fromkeys(found, "yes")
    for name, values in found.items():
        if values:
            options[name] = " ".join(values)
    return options


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each option, and the words of its value."""
    name = ""
    value: list[str] = []
    places = 0
    for word in words:
        is_option = _is_option(word)
        found = _SET.fullmatch(word)
        if name and (is_option or found):
            yield name, value
            name = ""
        if is_option:
            name, equal, rest = word.partition("=")
            value = []
            if equal:
                value.append(rest)
        elif found:
            yield found[1], [found[2]]
        elif name:
            value.append(word)
        else:
            places += 1
            yield f"argument {places}", [word]
    if name:
        yield name, value


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word.strip("-")) > 0 and not _NUMBER.fullmatch(word)


@dataclass(frozen=True)
class Differing:
    """What several runs were started with.

    Attributes:
        names: The names in whose values they differ, in the order of the commands.
        equal: The values that all of them have.
    """

    names: tuple[str, ...]
    equal: Mapping[str, str]

    @classmethod
    def among(cls, each: Sequence[Mapping[str, str]]) -> Differing:
        """Return how some mappings differ; a name that one of them lacks differs."""
        known = list(dict.fromkeys(name for one in each for name in one))
        values = {name: {one.get(name) for one in each} for name in known}
        equal = {name: each[0][name] for name in known if len(values[name]) == 1}
        return cls(tuple(name for name in known if name not in equal), equal)
