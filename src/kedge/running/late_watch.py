"""Inside the program: a watch that begins while the program runs, and ends when the command leaves.

# Note [When a late watch begins and ends]
PyTorch goes through its tables of hooks while a model computes, and raises an error if one changes
meanwhile; a model that was half way when the watch began would be seen in part. So the watch begins
before the next outermost call of a module, in the thread that makes it: a hook on all modules waits
for it. It ends there too, or in the main thread between two of its instructions if no thread is
inside PyTorch; or, if the main thread waits for something and nothing computes, in the thread that
listens to the command.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from kedge.files.own_file import leave_to_parent
from kedge.frames import frames_of_threads
from kedge.hooks.placing.own_warnings import ignore_warnings, show_warnings
from kedge.running.entry import CannotEnter, HeldSignals, LentModules
from kedge.sites.select import Selector
from kedge.stderr import Shield, reports_to
from kedge.store.writing.destination import check_place
from kedge.torch_internals import dynamo
from kedge.torch_internals.accelerators import is_capturing
from kedge.watch.models.holders import holders_of
from kedge.watch.models.optimizers import living, params_of
from kedge.watch.run.begin import begin_recording, make_watch
from kedge.watch.run.block import script_name
from kedge.watch.run.end_event import end_of
from kedge.watch.run.options import BEGINNING, ENDING, WatchOptions, manifest_of
from kedge.watch.run.ranks import LaunchedRank
from kedge.watch.run.recorder import RecordingSink
from kedge.watch.watcher import Watcher

_PAUSE = 0.1
"""Seconds between two attempts to end the watch."""

_SOON = 10
"""Attempts after which the main thread counts as waiting."""
_PATIENCE = 50
"""Attempts after which the listening thread ends the watch itself."""

_CALL = modules.__file__
_INSIDE = {
    _CALL,
    optimizers.__file__,
    torch.autograd.__file__,
    torch.autograd.graph.__file__,
    torch.autograd.function.__file__,
}
"""The files of PyTorch whose code goes through tables of hooks, and may not find them changed."""

LEFT = "the command left"


class LateState(IntEnum):
    """What is to become of a late watch: the command wants it, or has left; or all has been removed."""

    WANTED = 0
    UNWANTED = 1
    CLOSED = 2


_active: list[LateWatch] = []
"""The late watch of this process, if there is one."""


class LateWatch:
    """A watch of this process on behalf of a command in another one.

    Args:
        control: The connection to the command. The watch ends when it is closed there, by whatever
            cause.
        order: What the command asks for.
        lent: Finds Kedge's own imports during the watch.
    """

    def __init__(
        self,
        control: socket.socket,
        order: Mapping[str, Any],
        lent: LentModules,
    ) -> None:
        self._control = control
        self._lent = lent
        self._order = order
        self._recording = _recorder(order, self.tell)
        self._watch: Watcher | None = None
        self._next_call: Any = None
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._state = LateState.WANTED
        self._pid = os.getpid()
        self._undo = ExitStack()
        self._shield = Shield(*BEGINNING, tell=self.tell)

    def begin(self) -> None:
        """Wait for the next outermost call; called in the main thread.

        Raises:
            CannotEnter: The process is watched on behalf of another command.
            KedgeError: The options cannot be used.
        """
        if _active and _active[0]._pid == self._pid:
            raise CannotEnter("another kedge attach watches this process; end that one first")
        Selector(self._order["sites"])
        check_place(self._recording.place, self._order["force"])
        self._control.settimeout(1.0)
        leave_to_parent(self._control)
        _active[:] = [self]
        found = living()
        models = holders_of(param for optimizer in found for param in params_of(optimizer))
        self._send("entered", optimizers=_class_names(found), models=_class_names(models))
        self._await_call()
        atexit.register(self._program_ends)
        threading.Thread(target=self._listen, name="kedge attach", daemon=True).start()

    def tell(self, text: str) -> None:
        """Report to the user of the command."""
        self._send("says", text=text)

    def _send(self, event: str, **fields: Any) -> None:
        with suppress(OSError):  # the command may be gone
            self._control.sendall(json.dumps({"event": event} | fields).encode() + b"\n")

    # -- the program's threads
    # -----------------------------------------------------------------------

    def _await_call(self) -> None:
        with self._lock:
            if self._next_call is None and self._state is not LateState.CLOSED:
                self._next_call = modules.register_module_forward_pre_hook(self._before_call)

    def _before_call(self, module: nn.Module, args: Any) -> None:
        """Called before every call of a module, until the outermost one."""
        if not torch.compiler.is_compiling() and is_outermost_call(sys._getframe(1)):
            self._shield(self._at_call, module, args)

    def _at_call(self, module: nn.Module, args: Any) -> None:
        with self._lock:
            if self._next_call is not None:
                self._stop_waiting()
                if self._state is LateState.WANTED:
                    self._begin_with(module, args)
                else:
                    self._end(LEFT)

    def _stop_waiting(self) -> None:
        if self._next_call is not None:
            self._next_call.remove()
            self._next_call = None

    def _begin_with(self, module: nn.Module, args: Any) -> None:
        """Begin to watch, with a call whose hooks PyTorch has collected already."""
        ignore_warnings()
        self._undo.callback(show_warnings)
        self._undo.enter_context(reports_to(self.tell))
        if dynamo.refresh():
            self.tell(
                "the program's compiled code is compiled again, with the hooks; "
                "after the watch once more"
            )
        watch = make_watch(self._recording, _options(self._order))
        with ExitStack() as undo:
            undo.push(watch)
            watch.__enter__()
            watch.join_call(module, args)
            undo.pop_all()
        self._watch = watch
        self._send("began")

    def _program_ends(self) -> None:
        error = getattr(sys, "last_value", None)
        why = "the program ended"
        if error is not None:
            why += f" with {type(error).__name__}"
        self._end(why, error)

    def end_if_outside(self) -> None:
        """End the watch if no thread is inside PyTorch.

        Called in the main thread, between two of its instructions.
        """
        if self._state is LateState.UNWANTED and self._pid == os.getpid():
            if all_are_outside():
                self._end(LEFT)
            else:
                self._await_call()

    # -- the end
    # -------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Wait until the command closes the connection, and then for a moment to end the watch."""
        while not self._over.wait(_PAUSE):
            if _is_closed(self._control):
                self._state = LateState.UNWANTED
                self._seek_end()
        self._control.close()

    def _seek_end(self) -> None:
        for attempt in range(1, sys.maxsize):
            _in_main_thread()
            if self._over.wait(_PAUSE):
                return
            if attempt >= _SOON:
                self._await_call()
            if attempt >= _PATIENCE and all_are_outside():
                self._end(LEFT)

    def _end(self, why: str, error: BaseException | None = None) -> None:
        with self._lock:
            if self._state is LateState.CLOSED or self._pid != os.getpid():
                return
            # First: the main thread may be called back in the midst of this.
            self._state = LateState.CLOSED
            self._stop_waiting()
            atexit.unregister(self._program_ends)
            Shield(*ENDING, tell=self.tell)(self._close, error)
            self._undo.close()
            self._lent.remove()
            self._send("over", why=why)
            _active.clear()
            self._over.set()

    def _close(self, error: BaseException | None) -> None:
        if self._watch is None:
            return
        try:
            self._watch.__exit__(None, None, None)
        finally:
            summary = self._watch.summary
            self._recording.event(end_of(summary, int(error is not None), error))
            self._recording.close()
        self._send("summary", made=self._recording.writer is not None, figures=asdict(summary))


def _options(order: Mapping[str, Any]) -> WatchOptions:
    return WatchOptions(order["sites"], order["every"], order["budget"])


def _recorder(
    order: Mapping[str, Any],
    complain: Callable[[str], None],
) -> RecordingSink:
    place = Path(order["recording"])
    described = manifest_of(sys.argv, script_name(), _options(order))
    # One process, whatever others run beside it.
    alone = {**described, **LaunchedRank().describe(), "late": True}
    return RecordingSink(place, lambda: begin_recording(place, alone, order["force"]), complain)


def _class_names(things: list[Any]) -> list[str]:
    return [type(each).__name__ for each in things]


def _is_closed(control: socket.socket) -> bool:
    """Wait for the command for a short time; returns whether it has closed the connection."""
    try:
        with selectors.DefaultSelector() as selector:  # `select.select` knows 1,024 files alone
            selector.register(control, selectors.EVENT_READ)
            ready = selector.select(_PAUSE)
        return bool(ready) and not control.recv(1024)
    except (OSError, ValueError):
        return True


def _in_main_thread() -> None:
    """Have the main thread call `LateWatch.end_if_outside` between two of its instructions."""
    if not _waiting:
        _waiting.append(None)
        if ctypes.pythonapi.Py_AddPendingCall(_callback, None):  # too many wait already
            _waiting.clear()


def _called(_: Any) -> int:
    _waiting.clear()
    with HeldSignals(__file__):
        for watch in (*_active,):  # the end of the watch takes it out
            watch.end_if_outside()
    return 0


_waiting: list[None] = []
"""One entry while the main thread has not called back."""

_callback = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_called)
"""Never freed: the main thread may call back when the watch is over already."""


def is_outermost_call(frame: FrameType | None) -> bool:
    """Whether a hook before a module's call runs inside no other call, backward pass or optimizer's step.

    Args:
        frame: The frame that called the hook.
    """
    while frame is not None and frame.f_code.co_filename == _CALL:
        frame = frame.f_back
    return not _is_inside(frame) and not is_capturing()


def all_are_outside() -> bool:
    """Whether no thread but this one is inside PyTorch, and this one's callers are not either."""
    if is_capturing() or _is_inside(sys._getframe(1)):
        return False
    mine = threading.get_ident()
    others = [frame for thread, frame in frames_of_threads().items() if thread != mine]
    return not any(map(_is_inside, others))


def _is_inside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename in _INSIDE:
            return True
        frame = frame.f_back
    return False
