"""A command at work for longer than a second.

A line counts seconds on a terminal; elsewhere there is a line now and then.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TextIO

from kedge.short_text import seconds
from kedge.stderr import SpacedLines, shows_progress

if TYPE_CHECKING:
    import threading

#: The seconds before the first line, and between two, on a terminal.
PATIENCE = 1.0

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add the option of every command that shows progress; `heed_quiet` follows it."""
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress")


def heed_quiet(args: argparse.Namespace) -> None:
    """Show no progress from here on if the command has been told so."""
    _quiet.set(getattr(args, "quiet", False))


@contextmanager
def progress(
    what: str, patience: float = PATIENCE, lines: SpacedLines | None = None
) -> Iterator[None]:
    """Show that the work of a block goes on, and for how long.

    On a terminal, a line counts the seconds and is erased at the end. Elsewhere, as in a file or in
    CI, lines stay, and each comes later after the one before.

    Args:
        what: The work, such as ``reading train.kedge``.
        patience: The seconds before the line on a terminal appears.
        lines: When lines elsewhere are due.
    """
    if sys.stderr is None or _quiet.get():
        yield
        return
    import threading

    over = threading.Event()
    target: Callable[..., None] = _write
    args: tuple[Any, ...] = (what, over, lines or SpacedLines())
    if shows_progress(sys.stderr):
        target = _draw
        args = (what, sys.stderr, over, patience)
    work = threading.Thread(target=target, args=args, daemon=True)
    work.start()
    try:
        yield
    finally:
        over.set()
        work.join()


def _draw(what: str, stream: TextIO, over: threading.Event, patience: float) -> None:
    begun = time.monotonic()
    shown = False
    while not over.wait(patience):
        shown = True
        text = f"{what}: {time.monotonic() - begun:.0f} s"
        stream.write(f"\r{text[: _width(stream) - 1]}")
        stream.flush()
    if shown:
        stream.write("\r\x1b[K")
        stream.flush()


def _write(what: str, over: threading.Event, lines: SpacedLines) -> None:
    while not over.wait(lines.wait):
        lines.tell(f"{what}: {seconds(lines.passed)}")


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
