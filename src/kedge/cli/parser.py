"""The parser of a command, which answers what it cannot understand in one line; see Note [argparse] in ``main.py``."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Sequence
from typing import NoReturn

from kedge.shown_text import visible

#: The exit status of a command that cannot be carried out.
CANNOT = 2
#: Words of at most so many letters resemble another with one letter wrong or in the wrong place.
SHORT = 3


class CommandParser(argparse.ArgumentParser):
    """Parses the words of a command; options may stand before, between and after its arguments."""

    #: One line about the command.
    short: str = ""

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Return what was typed, or exit with the reason why it cannot be understood."""
        has_program = any(action.nargs == argparse.REMAINDER for action in self._actions)
        parse = self.parse_known_args if has_program else self.parse_known_intermixed_args
        found, strange = parse(words)
        if strange:
            self.refuse(self._strange(strange[0]))
        return found

    @property
    def options(self) -> Collection[str]:
        """The names of its options."""
        return self._option_string_actions

    @property
    def arguments(self) -> list[argparse.Action]:
        """What it takes, in order: an action without names of options is an argument."""
        return list(self._actions)

    def error(self, message: str) -> NoReturn:
        """Exit with an error that argparse found: without the usage, which may have ten lines."""
        said = message.removeprefix("argument ")
        if ";" not in said:
            said += f"; see {self.prog} --help"
        self.refuse(said)

    def refuse(self, message: str) -> NoReturn:
        """Exit with an error that says what to do."""
        self.exit(CANNOT, f"{self.prog}: {visible(message, lines=True)}\n")

    def _strange(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{word!r} is one argument too many; see {self.prog} --help"
        option = word.partition("=")[0]
        near = nearest(option, self.options)
        if near:
            return f"there is no option {option}; did you mean {near}?"
        return f"there is no option {option}; see {self.prog} --help"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that a mistyped one resembles most; None if it resembles none."""
    # Only now: a program that is run may have a module of this name.
    from difflib import get_close_matches

    least = 0.7 if len(word) > SHORT else 0.66  # two of three letters in order, as in "rnu"
    found = get_close_matches(word, list(known), n=1, cutoff=least)
    return next(iter(found), None)
