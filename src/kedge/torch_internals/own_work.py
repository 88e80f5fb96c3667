"""Kedge's own work inside a program: below the program's modes, and unseen by its profiler.

# Note [Own work]
A mode of the program (`TorchDispatchMode`, `TorchFunctionMode`) sees every operation on its thread,
and a profiler records it. So where Kedge's code begins, in a hook that PyTorch calls, it takes the
program's modes off and switches recording off, if there are any, and puts everything back at the
end: `if is_watched(): with OwnWork(): ...`. Only modes go: tensor subclasses work as ever. The
modes of PyTorch itself stay, in which tensors have no data or become part of a graph. What belongs
to the program is run with all of it in force again, by `programs_work`: functions of the user's,
and edits, which are part of what the program computes.

Nothing may leave a mode on PyTorch's stack, or take one off, inside of own work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from torch.autograd import profiler

from kedge.torch_internals.corners import find, lacks, late
from kedge.torch_internals.modes import function_modes, pop_function_mode, push_function_mode

_has_function_mode: Callable[[Any], bool] = find("torch:_C._has_torch_function_unary")
_count_dispatch_modes: Callable[[], int] = find("torch:_C._len_torch_dispatch_stack")
_profiling: Any = profiler
if lacks("own_work", "function_modes"):  # then everything is seen
    _has_function_mode = bool
    _count_dispatch_modes = lambda: 0  # noqa: E731
    _profiling = SimpleNamespace(_is_profiler_enabled=False)
_function_mode: Callable[[int], Any] = late("torch:_C._get_function_stack_at", lambda _: None)
_dispatch_mode: Callable[[int], Any] = late("torch:_C._get_dispatch_stack_at", lambda _: None)
_pop_dispatch_mode: Callable[[None], Any] = late(
    "torch:_C._pop_torch_dispatch_stack", lambda _: None
)
_push_dispatch_mode: Callable[[Any], None] = late(
    "torch:_C._push_on_torch_dispatch_stack", lambda _: None
)
_record: Callable[[bool], None] = late("torch:_C._autograd._enable_record_function", lambda _: None)


class _Here(threading.local):
    work: OwnWork | None = None


_here = _Here()

under_way: set[OwnWork] = set()
"""The blocks of own work on all threads: as a rule none, so that `programs_work` is not needed."""


def is_watched() -> bool:
    """Whether modes or a profiler may see this thread's operations.

    Kedge's own work must be `OwnWork` then.
    """
    if _has_function_mode(None) or _count_dispatch_modes() or _profiling._is_profiler_enabled:
        return _here.work is None
    return False


class OwnWork:
    """A block in which the program's modes and profiler see nothing; not inside of another.

    See Note [Own work].
    """

    __slots__ = ("_dispatch_modes", "_function_modes", "_lowest", "_recorded")

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self) -> None:
        """Take the program's modes off this thread, and switch recording off."""
        self._recorded = bool(_profiling._is_profiler_enabled)
        self._function_modes = [_function_mode(place) for place in range(function_modes())]
        standing = [_dispatch_mode(place) for place in range(_count_dispatch_modes())]
        of_program = [mode for mode in standing if getattr(mode, "_mode_key", None) is None]
        self._dispatch_modes = of_program
        # PyTorch's own lie below all others.
        self._lowest = len(standing) - len(of_program)
        _here.work = self
        under_way.add(self)
        try:
            if self._recorded:
                _record(False)
            while function_modes():
                pop_function_mode()
            while _count_dispatch_modes() > self._lowest:
                _pop_dispatch_mode(None)
        except BaseException:  # an interrupt
            self.end()
            raise

    def forget(self, mode: Any) -> None:
        """Do not put a dispatch mode back."""
        self._dispatch_modes = [each for each in self._dispatch_modes if each is not mode]

    def end(self) -> None:
        """Put everything back."""
        try:
            self._put_back()
        except BaseException:  # an interrupt
            self._put_back()
            raise

    def _put_back(self) -> None:
        _here.work = None
        under_way.discard(self)
        for mode in self._dispatch_modes[_count_dispatch_modes() - self._lowest :]:
            _push_dispatch_mode(mode)
        for mode in self._function_modes[function_modes() :]:
            push_function_mode(mode)
        if self._recorded:
            _record(True)


class _ProgramsWork:
    """A block inside of `OwnWork` that is seen as if it were outside."""

    __slots__ = ("_around",)

    def __init__(self, around: OwnWork) -> None:
        self._around = around

    def __enter__(self) -> None:
        self._around.end()

    def __exit__(self, *error: object) -> None:
        self._around.begin()


def leave_off(mode: Any) -> None:
    """Keep the block of own work that this thread is in from putting a dispatch mode back."""
    work = _here.work
    if work is not None:
        work.forget(mode)


def own_work() -> AbstractContextManager[None]:
    """Return a block of Kedge's own work; see Note [Own work]."""
    if is_watched():
        return OwnWork()
    return nullcontext()


def programs_work() -> AbstractContextManager[None]:
    """Return a block that runs something of the program's, also inside of own work."""
    work = _here.work
    if work is None:
        return nullcontext()
    return _ProgramsWork(work)
