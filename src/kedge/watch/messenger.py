"""How the user of a watched program is told something."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress


def messenger() -> Callable[[str], None]:
    """Make what tells the user something, on the stderr that this process has now."""
    stream = sys.stderr

    def tell(text: str) -> None:
        # The program may have closed it; there is nobody left to tell that to.
        with suppress(OSError, ValueError):
            print(f"[kedge] {text}", file=stream, flush=True)

    return tell
