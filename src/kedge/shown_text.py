"""Texts that a person reads on a terminal, or pastes into a shell: nothing in them is obeyed by either."""

from __future__ import annotations

import re
import shlex

CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""The characters that a terminal obeys, as a part of a regular expression's class; without line ends and tabs."""

_UNSEEN = re.compile(f"[{CONTROL}]")
_UNSEEN_OR_LINES = re.compile(f"[\t\n{CONTROL}]")


def visible(text: str, *, lines: bool = False) -> str:
    """Return a text whose control characters can be seen.

    Args:
        text: The text.
        lines: Whether line ends and tabs stay.
    """
    return (_UNSEEN if lines else _UNSEEN_OR_LINES).sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def typed(*words: object) -> str:
    """Return a command as it is to be typed: each word as one word, in one line that shows all of it."""
    return " ".join(_quoted(str(word)) for word in words)


def _quoted(word: str) -> str:
    """Return a word for a shell; one with control characters in the form that Bash and Zsh read escapes in."""
    if not _UNSEEN_OR_LINES.search(word):
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{_UNSEEN_OR_LINES.sub(_bytes, plain)}'"


def _bytes(found: re.Match[str]) -> str:
    """Return a character as its bytes in a file's name, which shells of all locales know."""
    is_byte = "\udc80" <= found[0] <= "\udcff"  # one that is no UTF-8, as Python keeps it
    encoded = found[0].encode("utf-8", "surrogateescape" if is_byte else "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in encoded)
