"""The command's side of watching a program that runs.

It enters the program, hears what the watch there reports, and lets the program go.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from kedge.errors import CannotAttach
from kedge.running import entry
from kedge.running.gdb import SIZE, free_page, is_installed, send_by_gdb
from kedge.running.private_folder import PrivateFolder
from kedge.running.process import RunningProcess
from kedge.running.remote_exec import FIRST, has_remote_exec, replace_request, send_by_python

OLDEST_TORCH = 2, 12

LENT = (
    "kedge",
    "cloudpickle",
    "markdown_it",
    "mdurl",
    "nanoarrow",
    "numpy",
    "pygments",
    "rich",
    "safetensors",
)
"""What is lent to an environment without Kedge: Kedge, and all that it needs but PyTorch."""

_PAUSE = 0.2

_CALL = """
def late_watch():
    from kedge.running.late_watch import LateWatch
    return LateWatch


enter({order!r}, late_watch)
"""


class AttachedProgram:
    """A program in which a late watch begins, and waits for the connection to be closed.

    Args:
        process: The process.
        control: The connection.

    Attributes:
        until: The time at which the watch is to end; None for no such time.
        found: The optimizers and the models that it found at first.
    """

    def __init__(self, process: RunningProcess, control: socket.socket) -> None:
        self.process = process
        self._control = control
        self.until: float | None = None
        self.found: Mapping[str, Any] = {}
        self._text = b""
        self._arrived: deque[Mapping[str, Any]] = deque()
        self._is_left = False

    def events(self) -> Iterator[Mapping[str, Any]]:
        """Yield what the watch reports, until all of it has been removed or the program has ended."""
        while True:
            while self._arrived:
                yield self._arrived.popleft()
            if self.until is not None and time.monotonic() > self.until:
                self.leave()
            part = self._part()
            if part == b"" or (part is None and not self.process.is_alive):
                return
            *lines, self._text = (self._text + (part or b"")).split(b"\n")
            self._arrived.extend(map(json.loads, lines))

    def leave(self) -> None:
        """Have the watch end; the program goes on."""
        if not self._is_left:
            self._is_left = True
            try:
                self._control.shutdown(socket.SHUT_WR)
            except OSError:  # the program has ended
                return

    def _part(self) -> bytes | None:
        """Return what has arrived; None if nothing did for a moment."""
        self._control.settimeout(_PAUSE)
        try:
            return self._control.recv(1 << 16)
        except TimeoutError:
            return None
        except ConnectionError:
            return b""

    def close(self) -> None:
        """Close the connection: the watch ends by itself as soon as it can."""
        self._control.close()


def attach(
    process: RunningProcess,
    wishes: Mapping[str, Any],
    patience: float,
) -> AttachedProgram:
    """Enter a program and have a late watch wait for its next step.

    Args:
        process: The process.
        wishes: The options of the watch, and where it records; see
            `kedge.running.late_watch.LateWatch`.
        patience: Seconds to wait until the program can be entered.

    Raises:
        CannotAttach: The program cannot be entered, or did not answer; nothing is left behind.
    """
    until = time.monotonic() + patience
    while True:
        program = _enter(process, {**_surroundings(), **wishes, "until": until})
        first = next(program.events(), {"event": "failed", "text": "it ended just now"})
        if first["event"] == "entered":
            program.found = first
            return program
        program.close()
        if first["event"] != "busy" or time.monotonic() > until:
            raise CannotAttach(f"process {process.pid} cannot be watched: {first['text']}")
        time.sleep(_PAUSE)


def _enter(process: RunningProcess, order: Mapping[str, Any]) -> AttachedProgram:
    with (
        PrivateFolder(process.owner) as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening,
    ):
        place = folder.path / entry.CONTROL
        listening.bind(str(place))
        place.chmod(0o600)
        folder.own(place)
        listening.listen(1)
        by_python = _send(process, {**order, "folder": str(folder.path)}, folder)
        try:
            return AttachedProgram(process, _answer(listening, process, order["until"]))
        finally:
            if by_python:
                replace_request(process)


def _send(
    process: RunningProcess,
    order: Mapping[str, Any],
    folder: PrivateFolder,
) -> bool:
    """Enter the program; returns whether Python itself did it."""
    if has_remote_exec(process):
        send_by_python(process, sent_text(order), folder)
        return True
    if not is_installed():
        raise CannotAttach(_no_way(process))
    page = free_page(process.maps)
    send_by_gdb(process, sent_text({**order, "page": (page, SIZE)}), page, folder)
    return False


def _no_way(process: RunningProcess) -> str:
    python = f"process {process.pid} runs Python 3.{process.python}"
    if (process.python or 0) >= FIRST:
        return (
            f"{python}, and this command Python 3.{sys.version_info[1]}, "
            "so that only gdb could enter it, which is not installed. "
            "Use the kedge command of the program's environment, "
            "or install gdb: apt-get install gdb"
        )
    return (
        f"{python}, which only gdb can enter (from 3.{FIRST} on Python itself can); "
        "install it: apt-get install gdb"
    )


def sent_text(order: Mapping[str, Any]) -> str:
    """Return the text that runs in the program: `kedge.running.entry`, and a call with the order.

    It runs in the namespace of the program's main module, where it must leave no name.
    """
    source = f"{Path(entry.__file__).read_text(encoding='utf-8')}\n{_CALL.format(order=order)}"
    builtins = "__import__('builtins')"
    compiled = f"{builtins}.compile({source!a}, {entry.TEXT_NAME!r}, 'exec', dont_inherit=True)"
    names = "{'__name__': 'kedge attach'}"
    call = f"{builtins}.exec({compiled}, {names})"
    return f"try:\n    {call}\nexcept BaseException:\n    pass\n"


def _surroundings() -> dict[str, Any]:
    """Return where this Kedge is, and what has to fit the program's environment."""
    folders = [
        str(Path(__file__).parents[2]),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    ]
    return {
        "version": metadata.version("kedge"),
        "python": tuple(sys.version_info[:2]),
        "torch": OLDEST_TORCH,
        "names": list(LENT),
        "places": list(dict.fromkeys(folders)),
    }


def _answer(
    listening: socket.socket,
    process: RunningProcess,
    until: float,
) -> socket.socket:
    listening.settimeout(_PAUSE)
    while time.monotonic() < until:
        try:
            answer, _ = listening.accept()
        except TimeoutError:
            if not process.is_alive:
                raise CannotAttach(f"process {process.pid} ended just now") from None
        else:
            return answer
    raise CannotAttach(
        f"process {process.pid} did not answer: "
        "its main thread stays in one long call, "
        "such as a sleep, a read, or a wait "
        f"for another thread or process{_where(process.pid)}. "
        "It will not be watched, and nothing is left in it; "
        "try again, or wait longer, as with --wait 5m"
    )


def _where(pid: int) -> str:
    """Return what the main thread waits for, if the system tells."""
    try:
        place = Path(f"/proc/{pid}/task/{pid}/wchan").read_text(encoding="ascii")
    except OSError:
        return ""
    if not place.strip("0") or os.geteuid() != 0:
        return ""
    return f" ({place}, says the system)"
