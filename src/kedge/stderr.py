"""What Kedge says to the user of a program that it runs in: lines on stderr, and no more than that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

STATUS = 2
"""The exit status of a program that was to be watched strictly and could not be."""


def messenger() -> Callable[[str], None]:
    """Return a function that writes one line to the stderr that this process has now."""
    stream = sys.stderr

    def tell(text: str) -> None:
        # The program may have closed it; there is nobody left to tell that to.
        with suppress(OSError, ValueError):
            print(f"[kedge] {text}", file=stream, flush=True)

    return tell


def say(text: str) -> None:
    """Write one line to stderr."""
    messenger()(text)


def give_up(what: str, instead: str, complain: Callable[[str], None], *, strict: bool) -> None:
    """Report a failure of Kedge itself; the program goes on, unless it was to be watched strictly.

    Args:
        what: What has failed.
        instead: What happens then, if the program goes on.
        complain: Tells the user.
        strict: Whether the program ends.

    Raises:
        SystemExit: It ends. This passes by `except Exception`, and a program has its `finally` blocks run.
    """
    complain(f"{what}; {'the program ends here, because of --strict' if strict else instead}")
    if strict:
        raise SystemExit(STATUS)
