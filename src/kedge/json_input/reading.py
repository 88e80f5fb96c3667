r"""JSON from files that may be damaged or hostile: what is not plain, finite and unambiguous is refused.

# Note [Texts from files]
A text of a file may contain what a terminal obeys: escape sequences, a carriage return, marks that
turn the direction of writing. Where a file is read, such characters become visible ones (`\x1b`),
so no printing place has to. Line ends and tabs stay in the texts that have lines, and are replaced
in all names. Halves of surrogate pairs, which no file can be written with, are replaced as well;
but the words of a command and its folder stay as they are, since it can be run again, and are
replaced where they are shown.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from kedge.shown_text import visible

#: The most bytes of a file that is read as a whole.
MOST_BYTES = 1 << 28
#: The most levels of a document.
MOST_LEVELS = 50
#: The keys of texts that have lines.
MANY_LINES = frozenset({"detail", "error", "text", "cause", "remedy"})
#: The keys of texts that are kept as they are.
AS_THEY_ARE = frozenset({"command", "folder", "script"})

# A document with none of these bytes has no such character: most documents need no second look.
_SUSPECT = re.compile(
    rb"\\[ubfnrt]|\x7f|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]"
)


class BadJson(ValueError):
    """A file cannot be read as it should be; the text names the reason."""


def open_regular(path: Path) -> FileIO:
    """Open a file for reading, without waiting for another process.

    Raises:
        BadJson: It is a device, a pipe, a socket or a folder.
        OSError: It cannot be opened.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    number = os.open(path, flags)
    kind = os.fstat(number).st_mode
    if not stat.S_ISREG(kind):
        os.close(number)
        raise BadJson(f"it is {_kind(kind)} and not a file")
    return FileIO(number, "r")


def read_regular(path: Path, start: int = 0) -> bytes:
    """Return the content of a file, or what follows its first `start` bytes.

    Raises:
        BadJson: It is no regular file, or larger than ``MOST_BYTES``.
        OSError: It cannot be read.
    """
    with open_regular(path) as file:
        file.seek(start)
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise BadJson(f"it has more than {MOST_BYTES >> 20} MB")
    return content


def parse(content: bytes, *, exact: bool = False) -> Any:
    """Return a JSON document.

    Args:
        content: The bytes of a file, or of one of its lines.
        exact: Whether texts stay as they are; see Note [Texts from files].

    Raises:
        BadJson: It is not JSON, or has a key twice, a number that is not finite, or too many
            levels.
    """
    try:
        text = content.decode("utf-8")
        document = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise BadJson(f"it is not JSON (byte {error.start} is not UTF-8)") from error
    except RecursionError:
        raise BadJson(f"it has more than {MOST_LEVELS} levels") from None
    except BadJson:
        raise
    except ValueError as error:
        raise BadJson(f"it is not JSON ({error})") from error
    _check_levels(document)
    if exact or not _SUSPECT.search(content):
        return document
    return _visible(document, ())


def _visible(value: Any, key: Any) -> Any:
    if isinstance(value, str) and key not in AS_THEY_ARE:
        return visible(value, lines=key in MANY_LINES)
    if isinstance(value, list):
        return [_visible(each, key) for each in value]
    if isinstance(value, Mapping):
        return {visible(name): _visible(each, name) for name, each in value.items()}
    return value


_NESTED = (dict, list)


def _check_levels(document: Any) -> None:
    level = [document]
    for _ in range(MOST_LEVELS):
        inner: list[Any] = []
        for outer in level:
            if isinstance(outer, dict):
                inner += outer.values()
            elif isinstance(outer, list):
                inner += outer
        level = [each for each in inner if type(each) in _NESTED]
        if not level:
            return
    raise BadJson(f"it has more than {MOST_LEVELS} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadJson(f"it has the key {twice[:80]!r} twice in one object")
    return found


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise BadJson(f"its number {digits[:40]} is too large")
    return number


def _constant(name: str) -> NoReturn:
    raise BadJson(f"it has {name}, which is not JSON")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
