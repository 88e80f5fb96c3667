"""The first code that runs inside the program.

Its text is sent there, so it imports nothing but the standard library.

# Note [Entering a program]
The text runs in the program's main thread, between two of its instructions. It must change nothing
there but begin the watch: what fails is reported to the command and never reaches the program. An
entry that comes too late, when the command has given up, finds nobody to report to, and does
nothing.

A signal that arrives meanwhile is the program's: its handler may raise, and the error must reach
the program's own code. So Python's handlers are exchanged for some that take note, and the signals
are sent again afterwards.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import shlex
import signal
import socket
import sys
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType
from typing import Any

TEXT_NAME = "<kedge attach>"
"""The file name of this code where it was sent as text."""

CONTROL = "control"
"""The name of the socket in the command's private folder."""

_PAUSE = 0.02
_PATIENCE = 5.0


class CannotEnter(Exception):
    """The watch cannot begin here; the text is for the user."""

    event = "failed"


class BusyImporting(CannotEnter):
    """The watch cannot begin yet: it would import a module that the program has half imported."""

    event = "busy"


def enter(order: Mapping[str, Any], late_watch: Callable[[], Any]) -> None:
    """Begin the watch that a command asks for; called in the main thread of the program.

    Args:
        order: The folder of the command's socket, the time until which it waits, the options of the
            watch, and where Kedge is.
        late_watch: Imports and returns `kedge.running.late_watch.LateWatch`; called when Kedge can
            be imported.
    """
    try:
        if time.monotonic() > order["until"]:
            return
        control = _connected(Path(order["folder"]))
        if control is not None:
            with HeldSignals(TEXT_NAME):
                _begin(control, order, late_watch)
    finally:
        _release(order.get("page"))


def _begin(
    control: socket.socket,
    order: Mapping[str, Any],
    late_watch: Callable[[], Any],
) -> None:
    lent = LentModules(order["names"], order["places"])
    try:
        _check(order)
        if importlib.util.find_spec("kedge") is None:
            _check_lending(order)
            sys.meta_path.append(lent)
        else:
            _check_kedge(order)
        late_watch()(control, order, lent).begin()
    except BaseException as error:  # noqa: BLE001  # the program must not see it
        event = "failed"
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, CannotEnter):
            event = error.event
            text = str(error)
        lent.remove()
        with suppress(OSError):
            control.sendall(json.dumps({"event": event, "text": text}).encode() + b"\n")
        control.close()


def _connected(folder: Path) -> socket.socket | None:
    """Return a connection to the command.

    Returns:
        None if it is gone, or if the folder is not a private one of its user.
    """
    own = (0, os.geteuid())
    try:
        home = folder.lstat()
        if home.st_uid not in own or home.st_mode & 0o077:
            return None
        if (folder / CONTROL).lstat().st_uid not in own:
            return None
        control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        control.settimeout(_PATIENCE)
        control.connect(str(folder / CONTROL))
    except OSError:
        control.close()
        return None
    return control


def _check(order: Mapping[str, Any]) -> None:
    half = _half_imported({"torch", *order["names"]})
    if half:
        raise BusyImporting(f"it is importing {half}")
    torch = sys.modules.get("torch")
    if torch is None:
        raise CannotEnter("the process has not imported torch; attach when it has begun to train")
    found = str(torch.__version__)
    if tuple(map(int, found.split(".")[:2])) < tuple(order["torch"]):
        oldest = ".".join(map(str, order["torch"]))
        raise CannotEnter(f"it uses PyTorch {found}; Kedge needs {oldest} or newer")


def _half_imported(packages: set[str]) -> str | None:
    """Return a module of these packages that some thread is importing."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            code = at.f_code
            is_frozen = code.co_filename.startswith("<frozen importlib")
            if is_frozen and code.co_name == "_find_and_load":
                name = str(at.f_locals.get("name"))
                package, _, _ = name.partition(".")
                if package in packages:
                    return name
            at = at.f_back
    return None


def _check_kedge(order: Mapping[str, Any]) -> None:
    found = importlib.metadata.version("kedge")
    if found != order["version"]:
        command = shlex.join([sys.executable, "-m", "kedge", "attach", str(os.getpid())])
        raise CannotEnter(
            f"its environment has Kedge {found}, "
            f"and this command is Kedge {order['version']}; "
            f"use the command of its environment: {command}"
        )


def _check_lending(order: Mapping[str, Any]) -> None:
    if tuple(order["python"]) != sys.version_info[:2]:
        own = ".".join(map(str, sys.version_info[:2]))
        lent = ".".join(map(str, order["python"]))
        command = shlex.join([sys.executable, "-m", "pip", "install", "kedge"])
        raise CannotEnter(
            "its environment has no Kedge, "
            "and that of this command cannot be lent to it: "
            f"it is for Python {lent}, and the process runs Python {own}. "
            f"Install Kedge there: {command}"
        )


def _release(page: tuple[int, int] | None) -> None:
    """Free the memory in which this text arrived; by now it is compiled."""
    if page is not None:
        libc = ctypes.CDLL(None)
        libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        libc.munmap(*page)


class LentModules:
    """Finds Kedge, and the packages that it needs, in the command's environment.

    That is for programs whose own environment lacks them. It is asked last, and knows these names
    only, so that the program finds nothing else through it.

    Args:
        names: The names of the packages.
        places: The folders of the command's environment.
    """

    def __init__(self, names: list[str], places: list[str]) -> None:
        self.names = frozenset(names)
        self.places = places

    def find_spec(
        self,
        name: str,
        path: Any = None,
        target: Any = None,
    ) -> ModuleSpec | None:
        """Return where a package is; called by Python's import."""
        if name not in self.names:
            return None
        return PathFinder.find_spec(name, self.places, target)

    def find_distributions(
        self,
        context: Any,
    ) -> Iterator[importlib.metadata.Distribution]:
        """Yield the metadata of these packages; called by `importlib.metadata`."""
        if context.name in self.names:
            yield from importlib.metadata.distributions(name=context.name, path=self.places)

    def remove(self) -> None:
        """Lend nothing more; what was imported stays."""
        with suppress(ValueError):
            sys.meta_path.remove(self)


class HeldSignals:
    """Holds back the program's signals during a ``with`` block in the main thread.

    See Note [Entering a program]. Signals without a handler in Python do what they always do.

    Args:
        files: The file names of code that must have returned before the signals are sent again.
    """

    def __init__(self, *files: str) -> None:
        self._files = frozenset(files)
        self._handlers: dict[int, Any] = {}
        self._arrived: list[int] = []

    def __enter__(self) -> None:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(number)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._arrived:
            here = threading.get_ident()
            threading.Thread(target=self._send_again, args=(here,), daemon=True).start()

    def _send_again(self, thread: int) -> None:
        while self._is_inside(thread):
            time.sleep(_PAUSE)
        for number in dict.fromkeys(self._arrived):
            interrupt_main(signal.Signals(number))

    def _is_inside(self, thread: int) -> bool:
        frame = sys._current_frames().get(thread)
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                return True
            frame = frame.f_back
        return False
