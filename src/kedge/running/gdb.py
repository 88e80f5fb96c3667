"""Runs a text of Python inside another process by means of gdb.

# Note [What gdb does]
The process is stopped for a moment. Anywhere it may hold the lock of its allocator or of Python, so
nothing is called that needs one: the text goes into fresh memory from the system, and Python is
asked to run it as a pending call, in the main thread between two instructions. The text frees that
memory itself. gdb is never killed: it may have borrowed the registers of a thread just then.
"""

from __future__ import annotations

import re
import secrets
import shutil
import signal
import subprocess

from kedge.errors import CannotAttach
from kedge.running.private_folder import PrivateFolder
from kedge.running.process import RunningProcess

SIZE = 1 << 16
"""Bytes of memory for the text."""

_PATIENCE = 120.0
_LAST_PATIENCE = 30.0

_LOWEST = 0x10_0000_0000
_HIGHEST = 0x60_0000_0000
"""Addresses that every 64-bit processor has."""

_DONE = "kedge: 0"
_SCRIPT = """
set confirm off
set pagination off
handle all nostop noprint pass
handle SIGINT nostop noprint pass
set unwindonsignal on
sharedlibrary libpython
sharedlibrary /libc\\.so
sharedlibrary ld-musl
print (long)&Py_AddPendingCall && (long)&PyRun_SimpleString && (long)&mmap
set $page = ((unsigned long(*)(unsigned long,unsigned long,int,int,int,long))mmap)({page}, {size}, 3, 0x100022, -1, 0)
if $page == {page}
  restore {text} binary {page}
  printf "kedge: %d\\n", ((int(*)(void*,void*))Py_AddPendingCall)((void*)PyRun_SimpleString, (void*)$page)
end
"""


_CALL = (
    *("-ex", "sharedlibrary /libc\\.so"),
    *("-ex", "sharedlibrary ld-musl"),
    *("-ex", "print ((int(*)(void))getpid)()"),
)
"""The commands by which gdb calls a function that does nothing."""


def is_installed() -> bool:
    """Whether this machine has gdb."""
    return shutil.which("gdb") is not None


def free_page(maps: str) -> int:
    """Return an address with nothing near it, from the text of ``/proc/PID/maps``."""
    ranges = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", maps, re.MULTILINE)
    taken = [(int(begin, 16), int(end, 16)) for begin, end in ranges]
    while True:
        page = _LOWEST + secrets.randbelow((_HIGHEST - _LOWEST) // SIZE) * SIZE
        if all(page + 2 * SIZE < begin or end < page - SIZE for begin, end in taken):
            return page


def send_by_gdb(
    process: RunningProcess,
    text: str,
    page: int,
    folder: PrivateFolder,
) -> None:
    """Have a process run a text of Python.

    Args:
        process: The process.
        text: The text, which must free its page.
        page: The address for it.
        folder: A private folder, for gdb's commands.

    Raises:
        CannotAttach: gdb could not do it.
    """
    trouble = trouble_with_calls()
    if trouble:
        raise CannotAttach(f"process {process.pid} was not entered: {trouble}")
    source = folder.write("text", text)
    script = folder.write("commands", _SCRIPT.format(page=hex(page), size=SIZE, text=source))
    said = _run("-p", str(process.pid), "-x", str(script))
    if _DONE not in said.splitlines():
        raise CannotAttach(f"process {process.pid} could not be entered by gdb: {_reason(said)}")


def trouble_with_calls() -> str:
    """Return why this gdb can call no function in a process on this machine; empty if it can.

    It is tried on a process of our own, since the one in which it fails goes on with a broken system
    call.
    """
    with subprocess.Popen(
        ["sleep", "600"],  # noqa: S607
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as asleep:
        try:
            said = _run("-p", str(asleep.pid), *_CALL)
        finally:
            asleep.kill()
    if "extended state" in said:
        return (
            "this gdb does not know all registers of this processor, and would break the process; "
            "install a newer gdb, or use Python 3.14, which needs none"
        )
    return ""


def _run(*words: str) -> str:
    """Run gdb, out of reach of the terminal's Ctrl-C, to its end; returns what it printed."""
    command = [
        "gdb",
        "-batch",
        "-nx",
        "-nw",
        "-iex=set auto-solib-add off",
        "-iex=set debuginfod enabled off",
        "-iex=set auto-load off",
        *words,
    ]
    with subprocess.Popen(  # noqa: S603  # leaving the block waits for it, and does not kill it
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as gdb:
        try:
            return gdb.communicate(timeout=_PATIENCE)[0]
        except subprocess.TimeoutExpired:
            gdb.send_signal(signal.SIGINT)  # makes it leave in good order
            return gdb.communicate(timeout=_LAST_PATIENCE)[0]


def _reason(said: str) -> str:
    if "ptrace" in said and "not permitted" in said:
        return (
            "the system does not permit it (ptrace). Attach as root; "
            "in a container, start it with --cap-add=SYS_PTRACE"
        )
    if "No symbol" in said:
        return (
            "it shows no Python that can run code; is it a program with a Python of its own inside?"
        )
    if "kedge: -1" in said:
        return "Python has too many other things to do first; try again"
    lines = [line for line in said.splitlines() if line.strip()]
    if not lines:
        return "gdb printed nothing"
    return lines[-1]
