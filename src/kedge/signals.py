"""Errors that a signal handler of the program raises while Kedge's code happens to run, such as a time-out."""

from __future__ import annotations

import functools
import signal
import traceback
from types import CodeType, FunctionType
from typing import Any


def came_by_signal(error: BaseException) -> bool:
    """Whether a signal handler of the program raised an error.

    Such an error is the program's own, wherever it arrives.
    """
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {code for handler in handlers if (code := _code_of(handler)) is not None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> CodeType | None:
    """Return the code of a handler; None if it is not a Python function, method or callable object."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if isinstance(handler, type) or not callable(handler):  # as SIG_DFL and SIG_IGN
        return None
    function = getattr(handler, "__func__", handler)
    if not isinstance(function, FunctionType):
        function = getattr(type(function), "__call__", None)  # noqa: B004
    return getattr(function, "__code__", None)
