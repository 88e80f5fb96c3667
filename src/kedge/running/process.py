"""What the system tells about a running process, and why it cannot be watched."""

from __future__ import annotations

import os
import pwd
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kedge.errors import CannotAttach

_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_CAP_SYS_PTRACE = 1 << 19
_OLDEST = 11


@dataclass(frozen=True)
class RunningProcess:
    """A process of this machine.

    Attributes:
        pid: Its number.
        proc: Its folder of the system's.
    """

    pid: int
    proc: Path

    @classmethod
    def found(cls, pid: int) -> RunningProcess:
        """Return a process that can be watched, as far as can be told from outside.

        Raises:
            CannotAttach: It cannot; the message gives the reason and the remedy.
        """
        if not sys.platform.startswith("linux"):
            raise CannotAttach(
                "kedge attach works on Linux; elsewhere start the program with kedge run"
            )
        process = cls(pid, Path("/proc") / str(pid))
        process.check()
        return process

    def check(self) -> None:
        """Raise an error if this process cannot be watched.

        Raises:
            CannotAttach: The message gives the reason and the remedy.
        """
        if not self.is_alive:
            raise CannotAttach(
                f"there is no process {self.pid}; list the Python processes: "
                "pgrep -a python. "
                "Inside a container they have other numbers"
            )
        trouble = (
            self._kind_of_trouble() or self._trouble_with_access() or self._trouble_with_content()
        )
        if trouble:
            raise CannotAttach(f"process {self.pid} {trouble}")

    @property
    def is_alive(self) -> bool:
        """Whether it exists and has not ended."""
        return self.status.get("State", "Z")[:1] not in {"Z", "X"}

    @property
    def status(self) -> dict[str, str]:
        """The fields of its ``status``; empty if it does not exist."""
        try:
            lines = (self.proc / "status").read_text(errors="replace").splitlines()
        except OSError:
            return {}
        fields = [line.partition(":") for line in lines]
        return {name: value.strip() for name, _, value in fields}

    @cached_property
    def owner(self) -> tuple[int, int]:
        """The user and the group in whose name it acts."""
        status = self.status
        return int(status["Uid"].split()[1]), int(status["Gid"].split()[1])

    @cached_property
    def maps(self) -> str:
        """Its mapped memory and files; empty if they may not be read."""
        try:
            return (self.proc / "maps").read_text(errors="replace")
        except OSError:
            return ""

    @cached_property
    def python(self) -> int | None:
        """The minor version of its Python, such as 11; None if it is not a Python process."""
        for pattern in (r"/libpython3\.(\d+)\S*$", r"/python3\.(\d+)$", r"/python3\.(\d+)/"):
            found = re.search(pattern, self.maps, re.MULTILINE)
            if found:
                return int(found[1])
        return None

    @property
    def command(self) -> list[str]:
        """Its command line."""
        try:
            words = (self.proc / "cmdline").read_bytes().split(b"\0")
        except OSError:
            return []
        return [word.decode(errors="replace") for word in words[:-1]]

    @property
    def script(self) -> str:
        """The name of its script or module, for the recording; ``python`` if none is seen."""
        words = iter(self.command[1:])
        for word in words:
            if word == "-c":
                return "python"
            if word in {"-W", "-X"}:
                next(words, None)
            elif not word.startswith("-"):  # -m is followed by the module
                return Path(word).name
        return "python"

    def _kind_of_trouble(self) -> str | None:
        status = self.status
        if self.pid == os.getpid():
            return "is this command itself; name the process that trains"
        if status.get("Tgid", str(self.pid)) != str(self.pid):
            return f"is a thread of process {status['Tgid']}; name that one"
        if status.get("State", "")[:1] in {"T", "t"} and status.get("TracerPid") == "0":
            return f"is stopped; let it run on: kill -CONT {self.pid}"
        if status.get("TracerPid", "0") != "0":
            return f"is held by a debugger, process {status['TracerPid']}; end that one first"
        return None

    def _trouble_with_access(self) -> str | None:
        if os.geteuid() not in (0, self.owner[0]):
            return (
                f"belongs to {_user(self.owner[0])}; "
                f"attach as that user, or as root: sudo kedge attach {self.pid}"
            )
        if not self.maps:
            return (
                "cannot be inspected by this user; "
                "attach as root, or from inside its container if it has one"
            )
        for kind in ("pid", "mnt"):
            if _namespace(self.proc, kind) != _namespace(Path("/proc/self"), kind):
                return (
                    "runs in another container, with other files than this command; "
                    "run the command in there: "
                    "docker exec -it CONTAINER kedge attach PID, "
                    "with the process's number inside"
                )
        return _trouble_with_debugging()

    def _trouble_with_content(self) -> str | None:
        if self.python is None:
            program = " ".join(self.command[:1])
            program = program or self.status.get("Name", "a part of the system")
            return f"is not a Python process, but {program}"
        if self.python < _OLDEST:
            return f"runs Python 3.{self.python}; Kedge needs 3.{_OLDEST} or newer"
        if "libtorch" not in self.maps:
            return (
                "has not imported torch; name the process that trains - "
                "of a launcher such as torchrun, one of its children"
            )
        return None


def _trouble_with_debugging() -> str | None:
    """Return why the system lets this user look into no process but its own children."""
    try:
        scope = int(_PTRACE_SCOPE.read_text())
    except (OSError, ValueError):
        return None
    if scope == 0 or (scope < 3 and _may_debug()):
        return None
    if scope == 3:
        return (
            f"cannot be entered: {_PTRACE_SCOPE} is 3, "
            "which forbids it to everybody until the machine starts again"
        )
    text = (
        f"cannot be entered by this user: {_PTRACE_SCOPE} is {scope}. "
        "Attach as root (in a container: "
        "one that was started with --cap-add=SYS_PTRACE)"
    )
    if scope == 1:
        text += " or allow it to all: sudo sysctl kernel.yama.ptrace_scope=0"
    return text


def _may_debug() -> bool:
    status = RunningProcess(os.getpid(), Path("/proc/self")).status
    return bool(int(status.get("CapEff", "0"), 16) & _CAP_SYS_PTRACE)


def _namespace(proc: Path, kind: str) -> str | None:
    try:
        return str((proc / "ns" / kind).readlink())
    except OSError:
        return None


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
