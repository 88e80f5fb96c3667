"""The end of a program, which becomes the end of this process."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any, NoReturn

SIGINT_STATUS = 130
_STDERR = 2
_MOST = sys.maxsize
_LEAST = -sys.maxsize - 1


Observers = tuple[Callable[..., Any] | None, Callable[..., Any] | None]


@dataclass(frozen=True)
class Ending:
    """The end of a program.

    Attributes:
        error: The uncaught exception; None if the program ran to its last line.
        status: The exit status as a shell sees it.
        observers: The functions of ``sys.settrace`` and ``sys.setprofile`` that the program has
            left, which see nothing of Kedge's work.
    """

    error: BaseException | None = None
    status: int = 0
    observers: Observers = field(default=(None, None), repr=False)

    def leave(self) -> NoReturn:
        """End this process as ``python`` would have; ``atexit`` comes after."""
        by_line, by_call = self.observers
        if isinstance(self.error, KeyboardInterrupt):
            # Python ends by the signal itself, but only if the exception reaches the top. This
            # module has already printed the exception, so silence the hook that would print it
            # again.
            sys.excepthook = _silent
            sys.setprofile(by_call)
            sys.settrace(by_line)
            raise KeyboardInterrupt
        left = SystemExit(self.status)
        sys.setprofile(by_call)
        sys.settrace(by_line)
        raise left


def ended_before(point: str, error: BaseException | None) -> str:
    """Return a sentence about a program that an error ended before some point.

    Empty if it ended by itself.
    """
    if error is None or isinstance(error, SystemExit):
        return ""
    return f"the program ended with {type(error).__name__} before {point}"


def end_with(error: BaseException | None) -> Ending:
    """Print an error as Python does when a program ends with it.

    Returns:
        The ending; its error is the ``SystemExit`` of ``sys.excepthook`` if that exits.
    """
    _flush()
    if error is None:
        return Ending()
    if isinstance(error, SystemExit):
        return Ending(error, _exit_status(error))
    try:
        _print_uncaught(error)
    except SystemExit as left:
        return Ending(left, _exit_status(left))
    status = SIGINT_STATUS if isinstance(error, KeyboardInterrupt) else 1
    return Ending(error, status)


def await_threads() -> None:
    """Wait for the threads of a program that has printed its error, as Python does before ``atexit``; daemons run on.

    This is Python's own function: it also ends the pools of threads, whose idle threads would be
    waited for forever. Python's call of it comes later, and does nothing then.
    """
    wait = getattr(threading, "_shutdown", _nothing)
    try:
        wait()
    except BaseException as error:  # noqa: BLE001 - an interrupt ends the waiting
        _print_ignored(error)


def _print_ignored(error: BaseException) -> None:
    """Pass an error to the hook for those that nobody can catch, or print it as Python's own hook does."""
    _flush()
    frames = _past_first(error)
    if sys.unraisablehook is not sys.__unraisablehook__:
        about = {"exc_type": type(error), "exc_value": error, "exc_traceback": frames}
        ignored: Any = SimpleNamespace(**about, err_msg=None, object=threading)
        with suppress(Exception):  # the hook is the program's
            sys.unraisablehook(ignored)
        return
    lines = [
        f"Exception ignored in: {threading!r}\n",
        "Traceback (most recent call last):\n",
        *traceback.format_tb(frames),
    ]
    _print_error("".join([*lines, f"{type(error).__qualname__}: {error}\n"]))


def _nothing() -> None:
    """Wait for nothing, in a Python without that function."""


def _exit_status(left: SystemExit) -> int:
    """Return the status of a ``SystemExit``.

    Print a code that is not a number as a message.
    """
    code: Any = left
    with suppress(
        BaseException
    ):  # a class of the program's may compute it; then the exception is printed itself
        code = left.code
    if code is None:
        return 0
    if isinstance(code, int):
        if _LEAST <= code <= _MOST:
            return code & 0xFF
        return 0xFF
    with suppress(BaseException):
        _print_error(str(code))
    _print_error("\n")
    return 1


def _print_uncaught(error: BaseException) -> None:
    kind = type(error)
    frames = error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, frames
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    if not hasattr(sys, "excepthook"):
        _print_error("sys.excepthook is missing\n")
        sys.__excepthook__(kind, error, frames)
        return
    try:
        sys.excepthook(kind, error, frames)
    except SystemExit:
        raise
    except BaseException as second:  # noqa: BLE001 - the program's hook may raise anything
        _print_failed_hook(second, error)


def _print_failed_hook(second: BaseException, error: BaseException) -> None:
    _flush()
    inner = _past_first(second)
    _print_error("Error in sys.excepthook:\n")
    sys.__excepthook__(type(second), second.with_traceback(inner), inner)
    _print_error("\nOriginal exception was:\n")
    sys.__excepthook__(type(error), error, error.__traceback__)


def _print_error(text: str) -> None:
    """Write to stderr as Python does: without the object, to the descriptor."""
    stream = getattr(sys, "stderr", None)
    with suppress(Exception):  # the program may have closed or replaced it
        if stream is None:
            os.write(_STDERR, text.encode(errors="backslashreplace"))
        else:
            stream.write(text)
            stream.flush()


def text_of(error: BaseException) -> str:
    """Return the last line of an error's traceback.

    An error whose text cannot be made has none.
    """
    name = type(error).__name__
    try:
        return f"{name}: {error}".removesuffix(": ")
    except BaseException:  # noqa: BLE001 - its text is the program's code
        return name


def _flush() -> None:
    """Flush the program's output, so that it comes before the next message."""
    for stream in (getattr(sys, "stderr", None), getattr(sys, "stdout", None)):
        # The program may have closed or replaced its streams; Python ignores that too.
        with suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


def _past_first(error: BaseException) -> TracebackType | None:
    """Return the frames of an error without the first one, which is Kedge's."""
    frames = error.__traceback__
    if frames is None:
        return None
    return frames.tb_next


def _silent(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """No-op in place of ``sys.excepthook``."""
