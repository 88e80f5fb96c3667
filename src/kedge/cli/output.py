"""The standard output of a command: text for people in any encoding, JSON for programs."""

from __future__ import annotations

import codecs
import io
import json
import sys
from typing import Any, TextIO

#: The characters that Kedge draws with, for an encoding that lacks them; one for one, so that
#: columns stay in line.
PLAIN = dict(zip("▁▂▃▄▅▆▇█✗✓→↔…·─│├└▲▼●▏▎▍▌▋▊▉", "_.:-=+*#xv><~.-|++^v*|||####", strict=True))


def make_writable() -> None:
    """Let stdout write every text.

    A character that its encoding lacks is replaced, by a similar one if Kedge drew it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("kedge-plain", _plain)
        sys.stdout.reconfigure(errors="kedge-plain")


def print_json(value: Any, file: TextIO | None = None) -> None:
    """Print a value as JSON, to stdout if no file is given."""
    print(json.dumps(value, indent=2, allow_nan=False), file=file)


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = ""
    for c in error.object[error.start : error.end]:
        text += PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode()
    return text, error.end
