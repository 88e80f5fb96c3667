"""A line on stderr while a command works for longer than a second."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from kedge.stderr import shows_progress

if TYPE_CHECKING:
    import threading

#: The seconds before the first line, and between two.
PATIENCE = 1.0


@contextmanager
def progress(what: str, patience: float = PATIENCE) -> Iterator[None]:
    """Show that the work of a block goes on, and for how long; the line is erased at its end.

    Args:
        what: The work, such as ``reading train.kedge``.
        patience: The seconds before the line appears.
    """
    if sys.stderr is None or not shows_progress(sys.stderr):
        yield
        return
    import threading

    over = threading.Event()
    line = threading.Thread(target=_tell, args=(what, sys.stderr, over, patience), daemon=True)
    line.start()
    try:
        yield
    finally:
        over.set()
        line.join()


def _tell(what: str, stream: TextIO, over: threading.Event, patience: float) -> None:
    begun, shown = time.monotonic(), False
    while not over.wait(patience):
        shown = True
        text = f"{what}: {time.monotonic() - begun:.0f} s"
        stream.write(f"\r{text[: _width(stream) - 1]}")
        stream.flush()
    if shown:
        stream.write("\r\x1b[K")
        stream.flush()


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
