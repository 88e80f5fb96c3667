"""Where the program is: noted while it runs, for whoever asks after a kill, and read from an error.

# Note [Looking at the program]
What hooks could tell costs time in every call, and steps that are not measured have none. So a
thread looks once a second at the frames of the program's threads, which costs the program nothing,
and writes what it has found over what it wrote before. It runs while the program waits for a
device or another process; not while code that waits holds Python's lock, when the last look is an
old one and says so.

Since Python 3.12 a fork beside a thread makes a warning, which would not be the program's. So there
only a process of several ranks has the thread, in which PyTorch has threads of its own anyway.

The thread is not one of `threading`, which a program may list and join. While it reads frames it
does nothing that lets others run, so none of them ends meanwhile and leaves its tensors to it. That
is why Python's search for garbage is off for that moment: it would run what the program does when
objects end.
"""

from __future__ import annotations

import _thread
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import Literal

from torch import nn

from kedge.by_identity import ByIdentity
from kedge.files.own_file import OVER, OwnFile
from kedge.frames import frames_of_threads, without_collector
from kedge.stderr import Shield
from kedge.store.events import Position, PositionEvent
from kedge.store.reading.json_files import position_file
from kedge.torch_internals.module_tables import modules_in
from kedge.torch_internals.running_calls import RunningCalls, running_calls
from kedge.torch_internals.source_lines import line_of
from kedge.watch.watcher import Watcher

PAUSE = 1.0
"""Seconds between two looks."""

_FAILED = "noting where the program is", "after a kill its module is not told"


class ProgramPosition:
    """Says where the program of a watch is, with the recorded names of its modules."""

    def __init__(self, watch: Watcher) -> None:
        self._watch = watch
        self._labels: ByIdentity[nn.Module, str] = ByIdentity()
        self._roots: list[int] = []

    def now(self) -> Position:
        """Return where the program is; see Note [Looking at the program]."""
        return self._position(*_of_program(_threads()))

    def of_error(self, error: BaseException) -> Position:
        """Return where an error came."""
        calls = running_calls(reversed(list(traceback.walk_tb(error.__traceback__))))
        return self._position(calls, calls.modules)

    def _position(self, calls: RunningCalls, modules: tuple[nn.Module, ...]) -> Position:
        direction: Literal["forward", "backward"] | None = None
        if calls.in_backward:
            direction = "backward"
        elif modules:
            direction = "forward"
        source = None
        if calls.code is not None:
            source = line_of(calls.code, calls.line)
        return Position(
            step=self._watch.step(), module=self._label(modules), direction=direction, source=source
        )

    def _label(self, modules: tuple[nn.Module, ...]) -> str | None:
        """Return the recorded path of the innermost of these modules that has one."""
        if not modules:
            return None
        with suppress(RuntimeError):  # the program adds a module just now; the next look finds it
            self._name_roots()
        for module in modules:
            if module in self._labels:
                return self._labels[module]
        return type(modules[0]).__name__

    def _name_roots(self) -> None:
        roots = [(root, root.module()) for root in [*self._watch.models.roots]]
        present = [id(module) for _, module in roots if module is not None]
        if present == self._roots:
            return
        for root, module in roots:
            if module is None:
                continue
            for path, inner in modules_in(module).items():
                if inner not in self._labels:
                    self._labels[inner] = root.label(path)
        self._roots = present


def _threads() -> list[RunningCalls]:
    """Return what each thread but this one does, the main one first."""
    own = _thread.get_ident()
    main = threading.main_thread().ident
    threads: list[RunningCalls] = []
    with without_collector():
        for thread, frame in frames_of_threads().items():
            calls = running_calls(traceback.walk_stack(frame))
            if thread == main:
                threads.insert(0, calls)
            elif thread != own:
                threads.append(calls)
        del frame
    return threads


def _of_program(threads: list[RunningCalls]) -> tuple[RunningCalls, tuple[nn.Module, ...]]:
    """Return the thread that trains, the main one being the first, and the modules that are called.

    What a backward pass calls again runs in the thread of a device, for which the other one waits.
    """
    busy = [calls for calls in threads if calls.modules or calls.in_backward]
    chosen = next(iter([*busy, *threads]))
    modules = chosen.modules
    if chosen.in_backward and not modules:
        modules = next((calls.modules for calls in busy if calls.modules), ())
    return chosen, modules


class PositionNotes:
    """Notes every second where the program is, in a file that is removed when it ends.

    Args:
        position: Says where it is.
        tell: Reports a failure to the user.
    """

    def __init__(self, position: ProgramPosition, tell: Callable[[str], None]) -> None:
        self._position = position
        self._path = Path()
        self._shield = Shield(*_FAILED, tell=tell)
        self._file: OwnFile | None = None
        self._last: PositionEvent | None = None
        self._width = 0
        self._ending = _thread.allocate_lock()
        self._ended = _thread.allocate_lock()

    def begin(self, folder: Path, rank: int, world: int) -> None:
        """Look from now on, and write into the recording of a rank; see Note [Looking at the program].

        Not in a Python without its lock, where frames end while they are read.
        """
        self._path = folder / position_file(rank)
        is_locked = getattr(sys, "_is_gil_enabled", _always)
        is_alone = world == 1 and sys.version_info >= (3, 12)
        if is_locked() and not is_alone:
            self._shield(self._begin)

    def _begin(self) -> None:
        self._file = file = OwnFile(self._path, OVER)
        self._ending.acquire()
        self._ended.acquire()
        _thread.start_new_thread(self._look_until_end, (file,))

    def end(self) -> None:
        """Look no more, and remove the file."""
        if self._file is None:
            return
        self._ending.release()
        # A look may wait for a disk that does not answer; the program does not wait with it.
        self._ended.acquire(timeout=PAUSE)
        self._file.close()
        self._file = None
        with suppress(OSError):  # the program may have removed the folder
            self._path.unlink()

    def _look_until_end(self, file: OwnFile) -> None:
        while not self._ending.acquire(timeout=PAUSE):
            self._shield(self._look, file)
        self._ended.release()

    def _look(self, file: OwnFile) -> None:
        position = self._position.now()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        since = now
        if self._last is not None and self._last.position == position:
            since = self._last.since
        self._last = PositionEvent(position=position, seen=now, since=since)

        line = dumps(self._last.entry())
        self._width = max(self._width, len(line))  # nothing of a longer one stays behind it
        file.overwrite(f"{line:{self._width}}\n".encode())


def _always() -> bool:
    return True
