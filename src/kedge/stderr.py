"""Kedge's reports to the user of the program that it runs in: lines on stderr, and a shield that reports failures."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

from kedge.files.own_file import high_copy
from kedge.shown_text import visible
from kedge.signals import came_by_signal

STATUS = 2
"""The exit status of a program whose strict watch failed."""

_PACKAGE = Path(__file__).parent

_here = SimpleNamespace(pid=os.getpid())
"""The id of this process; `os.getpid` would ask the system each time."""

os.register_at_fork(after_in_child=lambda: setattr(_here, "pid", os.getpid()))

P = ParamSpec("P")
T = TypeVar("T")


def messenger() -> Callable[[str], None]:
    """Return a function that writes one line to the current stderr of this process.

    It writes nothing once the program has closed that stderr, or another file has its number: that
    may be the program's.
    """
    stream = getattr(sys, "stderr", None)
    file = _file_of(stream)

    def tell(text: str) -> None:
        with suppress(Exception):  # a failure to report cannot be reported anywhere
            if stream is not None and _file_of(stream) == file:
                stream.write(f"[kedge] {visible(text)}\n")
                stream.flush()

    return tell


def lasting_messenger() -> Callable[[str], None]:
    """Return a `messenger` for the length of a program, which may close its stderr or put another file in its place.

    Then a line goes to the stderr that was there at first, by a number of Kedge's own. Forked
    children close that number.
    """
    tell, stream = messenger(), sys.stderr
    file = _file_of(stream)
    if file is None or stream is None:
        return tell
    copy = high_copy(stream.fileno())
    os.register_at_fork(after_in_child=lambda: _close(copy, file))

    def tell_always(text: str) -> None:
        if _file_of(stream) == file:
            tell(text)
        elif _file_at(copy) == file:
            with suppress(OSError):
                os.write(copy, f"[kedge] {visible(text)}\n".encode(errors="backslashreplace"))

    return tell_always


def _close(number: int, file: tuple[int, int]) -> None:
    if _file_at(number) == file:
        os.close(number)


def _file_at(number: int) -> tuple[int, int] | None:
    """Return the device and the inode of an open file; None if none has the number."""
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _file_of(stream: Any) -> tuple[int, int] | None:
    """Return the device and the inode of a stream's file; None for a stream without one, as in a notebook."""
    try:
        return _file_at(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None


def print_error(text: str) -> None:
    """Write one line to stderr, if there is one that can be written; `print` would write to stdout in its place."""
    if sys.stderr is not None:
        with suppress(OSError):  # a failure to report cannot be reported anywhere
            sys.stderr.write(f"{text}\n")


_elsewhere: list[Callable[[str], None]] = []
"""Receives what is said, instead of stderr; the last one."""


def say(text: str) -> None:
    """Write one line to stderr, or to where reports go instead."""
    (_elsewhere[-1] if _elsewhere else messenger())(text)


@contextmanager
def reports_to(tell: Callable[[str], None]) -> Iterator[None]:
    """Send what is said during a block elsewhere than to stderr."""
    _elsewhere.append(tell)
    try:
        yield
    finally:
        _elsewhere.remove(tell)


def _nothing() -> None:
    return None


class Shield:
    """Runs Kedge's work inside the user's program: its first failure is reported and ends that work, not the program.

    In a forked process nothing is run: the files that the work writes to belong to the parent.

    Args:
        what: The name of the work, as the user knows it: "writing".
        instead: What happens after it has failed: "the program goes on, but is not recorded from
            here on".
        tell: Reports the failure.
        on_failure: Cleans up before the report.
        strict: Whether a failure ends the program, as with ``--strict``.
        plain: Errors that are reported by their text alone; for others the type and Kedge's line
            are added.

    Attributes:
        failure: The first error. Its notes hold the text of the traceback; the traceback itself is
            dropped, as it would keep values alive.
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
        """Return the work's result; None if it fails, or is not run.

        Raises:
            SystemExit: It failed, and `strict` ends the program.
            Exception: A signal handler of the program raised it.
        """
        if self.off or _here.pid != self.pid:
            return None
        try:
            return work(*args, **named)
        except Exception as error:
            if came_by_signal(error):
                raise
            self.fail(error)
            return None

    def fail(self, error: Exception) -> None:
        """Report a failure, and run nothing more.

        Raises:
            SystemExit: `strict` ends the program. This passes by `except Exception`, and its
                `finally` blocks are run.
        """
        self.failure, self.off = error, True
        self.on_failure()
        after = "the program ends here, because of --strict" if self.strict else self.instead
        described = str(error) if isinstance(error, self.plain) else described_failure(error)
        self.tell(f"{self.what} failed: {described}; {after}")
        release_frames(error)
        if self.strict:
            raise SystemExit(STATUS)


def described_failure(error: Exception) -> str:
    """Return an error's type and text, with Kedge's innermost line in its traceback."""
    try:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # noqa: BLE001 - an error of the program's own class
        text = type(error).__name__
    place = _place_of(error)
    return f"{text} ({place})" if place else text


def release_frames(error: Exception) -> None:
    """Replace an error's traceback by its text in a note: its frames hold tensors of the program."""
    with suppress(Exception):  # the text is that of an error of the program's own class
        error.add_note("".join(traceback.format_exception(error)))
    error.with_traceback(None).__cause__ = error.__context__ = None


def _place_of(error: Exception) -> str:
    """Return Kedge's innermost line in an error's traceback, such as ``watch/records/losses.py:73``; empty if none."""
    files = [
        (Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)
    ]
    own = [
        (file, line)
        for file, line in files
        if file.is_relative_to(_PACKAGE) and file != Path(__file__)
    ]
    return f"{own[-1][0].relative_to(_PACKAGE)}:{own[-1][1]}" if own else ""


class SpacedLines:
    """Lines about long work for a log: the first after some time, each further one after twice the time, up to a longest pause.

    Args:
        first: The seconds before the first line.
        longest: The longest pause between two lines, in seconds.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        first: float = 10.0,
        longest: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._next, self._longest, self._clock = first, longest, clock
        self._begun = clock()

    @property
    def passed(self) -> float:
        """The seconds since the work began."""
        return self._clock() - self._begun

    @property
    def wait(self) -> float:
        """The seconds until the next line is due; none if it is."""
        return max(self._next - self.passed, 0.0)

    def tell(self, text: str) -> None:
        """Write a line."""
        say(text)
        passed = self.passed
        self._next = passed + min(passed, self._longest)


def shows_progress(stream: Any) -> bool:
    """Whether a stream, or a console of rich, is a terminal that someone watches: a line may be drawn anew there."""
    is_terminal = (
        stream.is_terminal if hasattr(stream, "is_terminal") else getattr(stream, "isatty", bool)()
    )
    return bool(is_terminal) and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"
