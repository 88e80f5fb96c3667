"""Whose code runs: the program's, or code that only passes calls on.

# Note [Variables of a frame]
Up to Python 3.12 a function's frame that is asked for its variables puts them into a dict, which
keeps the values alive until the function returns. So the dict is emptied after reading - unless
something else may hold it: a debugger, or the program by `locals()`, which returns the same dict.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

OWN = f"{Path(__file__).parent}{os.sep}"
INSTALLED = ("site-packages", "dist-packages")
_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"


@dataclass(frozen=True)
class SourceLine:
    """One place in a program's code.

    Attributes:
        file: The file, relative to the current folder if it is inside.
        line: The line's number.
        function: The function's qualified name.
        text: The line, without the white space around it; None if it cannot be read.
    """

    file: str
    line: int
    function: str
    text: str | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@functools.lru_cache(maxsize=4096)
def is_between(file: str) -> bool:
    """Whether a file's code only passes calls on: that of Kedge, PyTorch and Python's library."""
    if file.startswith(OWN) or is_torch(file):
        return True
    if file.startswith(_LIBRARY):
        return file[len(_LIBRARY) :].partition(os.sep)[0] not in INSTALLED
    return file.startswith("<frozen ")


@functools.lru_cache(maxsize=4096)
def is_torch(file: str) -> bool:
    """Whether a file is PyTorch's."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return torch is not None and file.startswith(f"{Path(torch).parent}{os.sep}")


@functools.lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed library, not to the program."""
    return not {*INSTALLED}.isdisjoint(Path(file).parts)


def frames_around(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, then those that called it, the outermost last."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return a frame's own variables, and leave nothing that keeps them alive.

    None of a function that asks for its variables itself, since it would see that they were read;
    see Note [Variables of a frame].
    """
    code = frame.f_code
    if sys.version_info >= (3, 13) or not code.co_flags & inspect.CO_OPTIMIZED:
        return dict(frame.f_locals)
    if "locals" in code.co_names:
        return {}
    in_frame = frame.f_locals
    variables = dict(in_frame)
    holders = sys.getrefcount(in_frame) - 2  # without this function's variable and the argument
    if holders == 1 and sys.gettrace() is None and sys.getprofile() is None:
        in_frame.clear()
    return variables


@contextmanager
def without_collector() -> Iterator[None]:
    """Context in which Python's search for garbage does not begin.

    It would run what the program does when objects end.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def frames_of_threads() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by its identifier.

    Before Python 3.11.9 a search for garbage that began in it would wait for ever for the lock that
    `sys._current_frames` holds (https://github.com/python/cpython/issues/106883).
    """
    with without_collector():
        return sys._current_frames()


def level_of_program() -> int:
    """Return the ``stacklevel`` of a warning at the program's running line, for the function that calls this and warns.

    That is the innermost line outside of Kedge, PyTorch, Python's library and installed packages.
    If there is none, installed packages count, then also PyTorch.
    """
    caller = sys._getframe(1)
    return (
        _level(caller, lambda file: is_between(file) or is_installed(file))
        or _level(caller, is_between)
        or _level(caller, lambda file: file.startswith(OWN))
        or 2
    )


def _level(caller: FrameType, passes: Callable[[str], bool]) -> int:
    """Return the level of the innermost frame around a caller whose file does not only pass calls on; 0 without one."""
    level, frame = 2, caller.f_back
    while frame is not None and passes(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return 0 if frame is None else level
