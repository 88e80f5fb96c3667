"""How Kedge reports to the user of a program that it runs in: lines on stderr, and what reports a failure of its own."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import ParamSpec, TypeVar

STATUS = 2
"""The exit status of a program that was to be watched strictly and could not be."""

_PACKAGE = Path(__file__).parent

_here = SimpleNamespace(pid=os.getpid())
"""This process, of which `os.getpid` would ask the system each time."""

os.register_at_fork(after_in_child=lambda: setattr(_here, "pid", os.getpid()))

P = ParamSpec("P")
T = TypeVar("T")


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


def _nothing() -> None:
    return None


class Shield:
    """Runs Kedge's work inside somebody's program: its first failure is reported and ends that work, not the program.

    In a process that was forked off nothing is run: what the work writes to belongs to the parent.

    Args:
        what: What the work does, as the user knows it: "writing".
        instead: What happens after it has failed: "the program goes on, but is not recorded from here on".
        tell: Reports the failure.
        on_failure: Cleans up before it is reported.
        strict: Whether the program ends then, as ``--strict`` asks.
        plain: Errors whose text says all that a user needs; of others the type and Kedge's line are reported as well.

    Attributes:
        failure: The error it failed with; its notes hold the traceback, which itself would keep alive what it went through.
        off: Whether nothing more is run, as after a failure.
        pid: The process in which the work is run.
    """

    def __init__(
        self,
        what: str,
        instead: str,
        *,
        tell: Callable[[str], None] = say,
        on_failure: Callable[[], None] = _nothing,
        strict: bool = False,
        plain: type[Exception] | tuple[type[Exception], ...] = (),
    ) -> None:
        self.what, self.instead, self.strict, self.plain = what, instead, strict, plain
        self.tell, self.on_failure = tell, on_failure
        self.failure: Exception | None = None
        self.off = False
        self.pid = os.getpid()

    def __call__(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
        """Return what the work returns; None if it fails, or is not run.

        Raises:
            SystemExit: It failed, and the program is to end.
        """
        if self.off or _here.pid != self.pid:
            return None
        try:
            return work(*args, **named)
        except Exception as error:  # noqa: BLE001 - it is the user's program that runs around this
            self.fail(error)
            return None

    def fail(self, error: Exception) -> None:
        """Report a failure, and run nothing more.

        Raises:
            SystemExit: The program is to end. This passes by `except Exception`, and its `finally` blocks are run.
        """
        self.failure, self.off = error, True
        self.on_failure()
        after = "the program ends here, because of --strict" if self.strict else self.instead
        self.tell(f"{self.what} failed: {self._described(error)}; {after}")
        error.add_note("".join(traceback.format_exception(error)))
        error.with_traceback(None)
        if self.strict:
            raise SystemExit(STATUS)

    def _described(self, error: Exception) -> str:
        if isinstance(error, self.plain):
            return str(error)
        place = _place_of(error)
        return f"{type(error).__name__}: {error}".removesuffix(": ") + (f" ({place})" if place else "")


def _place_of(error: Exception) -> str:
    """Return the innermost line of Kedge that an error passed, such as ``watch/records/losses.py:73``; empty if there is none."""
    files = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(file, line) for file, line in files if file.is_relative_to(_PACKAGE) and file != Path(__file__)]
    return f"{own[-1][0].relative_to(_PACKAGE)}:{own[-1][1]}" if own else ""
