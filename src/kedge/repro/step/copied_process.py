"""A copy of the process that does some work, of which the program notices nothing.

# Note [A copy of the process]
A fork copies the memory of a process, with the batch, the weights and the variables of every frame:
the two that are made here take 27 ms for 0.1 GB, and 0.32 s for 4 GB; the pages are shared until one
of the two writes. The copy can run the program's own code again, and change what it likes: the
program goes on as if nothing had been done. For that to be so,

* the fork is the C library's and not Python's: Python's would call what libraries have registered
  for forks in the program too, and since 3.12 it warns of other threads;
* the copy is nobody's child: it is made by a child that ends at once and is waited for, so that the
  program's own `os.wait` never sees it;
* its files are its own: what the program reads is opened anew, what it writes to leads nowhere, and
  so do its sockets and pipes;
* memory that processes share, as that of a loader's batches, is copied: what the program's code
  changes in place would change in the program, too;
* whatever would reach outside is refused: opening a file to write, removing or renaming one,
  starting a program, a connection;
* what opens files without Python is refused by the kernel, where that has Landlock;
* it computes on one thread, as the pools of threads do not exist in it; a lock that another thread
  held at the fork is never released there, so an alarm ends the copy after some time, and with it
  what it has begun; the child that makes it is ended by the program if it does not end by itself;
* if memory runs out, the kernel ends the copy, and not the program.

Only the examination is lost if the copy ends early. A process with a device's context has no such
copy, nor has one of several ranks, whose code would wait for the others.
"""

from __future__ import annotations

import _imp
import ctypes
import fcntl
import functools
import mmap
import os
import resource
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from kedge.files.pressure import Pressure
from kedge.repro.step.writing_forbidden import forbid_writing

MOST_SECONDS = 60
"""Seconds after which a copy is ended."""
_LONG_TURN = 0.1
"""Seconds for which other threads wait for the interpreter while a copy is made; most forks take less."""
_TIMES_A_FORK, _LEAST_PATIENCE = 10.0, 1.0
"""The program waits for its child, which makes one more fork, so many times as long as its own took, and so many seconds."""
_PAUSE = 0.0005
_DESCRIPTORS = Path("/proc/self/fd")
_MAPS = Path("/proc/self/maps")
_OWN_MEMORY = Path("/proc/self/statm")
_AT_THIS_ADDRESS = 0x10
"""``MAP_FIXED`` of Linux."""
_END_WITH_PARENT = 1
"""``PR_SET_PDEATHSIG`` of Linux."""
_FIRST_TO_END = Path("/proc/self/oom_score_adj")
_SHARED = ("/dev/shm/", "/dev/zero")  # noqa: S108
"""Beginnings of the names under ``/dev/`` that shared memory has."""
_MOST_SHARED = 1 << 31
"""Most bytes of shared memory that are copied."""
_SIGNALS = (
    signal.SIGALRM,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_REFUSED = (
    "os.chmod",
    "os.chown",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.kill",
    "os.link",
    "os.mkdir",
    "os.posix_spawn",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.startfile",
    "os.symlink",
    "os.system",
    "os.truncate",
    "os.utime",
    "shutil.",
    "socket.",
    "sqlite3.connect",
    "subprocess.Popen",
    "tempfile.",
    "urllib.Request",
)
"""Beginnings of the names of the audit events that a copy refuses, beside opening a file to write."""


class Refused(BaseException):
    """The program's code tried to reach outside of the copy; no ``except Exception`` goes on."""


class CopiedProcess:
    """Some work in a copy of this process; see Note [A copy of the process].

    Args:
        work: Runs in the copy; what it returns comes back.
    """

    def __init__(self, work: Callable[[], bytes]) -> None:
        self._arrived = bytearray()
        self._reader = -1
        self._pid = os.getpid()
        try:
            self._reader, writer = os.pipe()
        except OSError:  # the program has as many files open as it may have
            return
        os.set_blocking(self._reader, False)
        began = time.monotonic()
        try:
            with _import_lock(), _no_thread_asking():
                library = _library()
                child = _fork()
                if child == 0:
                    _become_a_copy(library, work, writer)
        except OSError:  # no memory, or too many processes
            self.close()
            child = -1
        finally:
            os.close(writer)
        if child > 0:
            took = time.monotonic() - began
            _await_end(child, _TIMES_A_FORK * took + _LEAST_PATIENCE)

    def result(self, seconds: float = 0.0) -> bytes | None:
        """Return what the work returned; empty if it came to nothing, None if it goes on.

        Args:
            seconds: How long to wait for it.
        """
        if self._pid != os.getpid():
            return b""  # a fork of the program
        until = time.monotonic() + seconds
        while self._reader >= 0:
            left = max(0.0, until - time.monotonic())
            reading = select.poll()  # `select.select` knows the first 1024 files alone
            reading.register(self._reader, select.POLLIN)
            if not reading.poll(left * 1000):
                return None
            part = os.read(self._reader, 1 << 16)
            self._arrived += part
            if not part:
                self.close()
        return bytes(self._arrived.partition(b"\n")[2])

    def close(self) -> None:
        """Wait for it no longer."""
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1
        number = self._arrived.partition(b"\n")[0]
        if number:
            # Where this process is the first one of a container, what it lost becomes its child.
            with suppress(ChildProcessError):
                os.waitpid(int(number), os.WNOHANG)


@contextmanager
def _import_lock() -> Iterator[None]:
    """Context that holds the lock of imports, which Python takes before a fork and releases in the child."""
    _imp.acquire_lock()
    try:
        yield
    finally:
        _imp.release_lock()


@contextmanager
def _no_thread_asking() -> Iterator[None]:
    """Context in which no thread asks this one for the interpreter: in the copy it would wait for that thread, for ever.

    A thread asks when it has waited for the switch interval. So that is made longer, and those that
    have waited until now get their turn.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_LONG_TURN)
    try:
        time.sleep(0)
        yield
    finally:
        sys.setswitchinterval(before)


def _await_end(child: int, seconds: float) -> None:
    """Wait until a child has ended, which has little to do; end it if it does not."""
    until = time.monotonic() + seconds
    with suppress(ChildProcessError):  # the program ignores the end of its children
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return
            time.sleep(_PAUSE)


def can_copy() -> bool:
    """Whether this process can have a copy, and the memory for one."""
    if not sys.platform.startswith("linux") or not _DESCRIPTORS.is_dir():
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    has_its_lock: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    if not has_its_lock():  # a fork beside threads that run at once needs Python's own
        return False
    return _has_memory_for_a_copy()


def _has_memory_for_a_copy() -> bool:
    """Whether as much memory is free as this process has: as it goes on, it may write to all of it."""
    room = Pressure().room()
    try:
        own = int(_OWN_MEMORY.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return False
    return room is not None and own <= room


def each_in_a_copy(works: Iterator[Callable[[], bytes]], most: int) -> bytes:
    """Do one work after the other, each in a fork of this copy, until one returns something.

    A work that comes to nothing may have changed what it met.
    """
    for _, work in zip(range(most), works, strict=False):
        reader, writer = os.pipe()
        if _fork() == 0:
            _library().prctl(_END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
            _end_with(work, writer)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            found = file.read()
        if found:
            return found
    return b""


@functools.cache
def _library() -> ctypes.PyDLL:
    """Return the C library, whose functions run while this thread holds the interpreter."""
    return ctypes.PyDLL(None, use_errno=True)


def _fork() -> int:
    """Fork as the C library does; the interpreter stays locked by this thread."""
    pid: int = _library().fork()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "fork failed")
    return pid


def _become_a_copy(library: ctypes.PyDLL, work: Callable[[], bytes], writer: int) -> None:
    """Run in the child of the program: leave the work to a child of its own, and end.

    Until the interpreter's lock is made anew, nothing may release it: threads that waited for it are
    still counted, and do not exist.
    """
    try:
        if _fork() != 0:
            os._exit(0)
        library.alarm(MOST_SECONDS)
        for each in _SIGNALS:  # Python's own functions are for the main thread
            library.signal(ctypes.c_int(each), ctypes.c_void_p(0))
        # Libraries may have registered functions for a child, as for a loader's workers.
        ctypes.pythonapi.PyOS_AfterFork_Child()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.write(writer, b"%d\n" % os.getpid())
        with suppress(OSError):  # `/proc` may be read alone
            _FIRST_TO_END.write_text("1000", encoding="ascii")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _leave_shared_memory(library)
        _leave_files(writer)
        # A notebook's own would wait for a thread that does not exist here.
        sys.stdout = sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        forbid_writing(library)
        sys.addaudithook(_refuse)
        sys.dont_write_bytecode = True
        torch.set_num_threads(1)
        torch.save = _refuse_to_save
        _end_with(work, writer)
    finally:
        os._exit(1)  # what the child holds of the program's must not be ended here


def _end_with(work: Callable[[], bytes], writer: int) -> None:
    """Do some work, hand over what it returned, and end this process."""
    try:
        left = memoryview(work())
        while left:
            left = left[os.write(writer, left) :]
    finally:
        os._exit(0)  # nobody would see an error, and the program's own exit must not run


def _leave_shared_memory(library: ctypes.PyDLL) -> None:
    """Put memory of this process alone, with the same content, in the place of what it shares."""
    shared = []
    for line in _MAPS.read_text().splitlines():
        where, access, _, _, _, *file = line.split(maxsplit=5)
        if not (access.startswith("rw") and access.endswith("s")):
            continue
        if file and file[0].startswith("/dev/") and not file[0].startswith(_SHARED):
            raise Refused("the memory of a device")
        start, end = (int(each, 16) for each in where.split("-"))
        shared.append((start, end - start))
    if sum(size for _, size in shared) > _MOST_SHARED:
        raise Refused("shared memory")
    library.mmap.restype = ctypes.c_void_p
    for start, size in shared:
        content = ctypes.string_at(start, size)
        address = ctypes.c_void_p(start)
        readable = mmap.PROT_READ | mmap.PROT_WRITE
        own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _AT_THIS_ADDRESS
        made = library.mmap(address, ctypes.c_size_t(size), readable, own, -1, ctypes.c_long(0))
        if made != start:
            raise Refused("shared memory")
        ctypes.memmove(start, content, size)


def _leave_files(kept: int) -> None:
    """Open the files that the program reads anew, and let everything else lead nowhere.

    Two processes with one open file share its position.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for path in list(_DESCRIPTORS.iterdir()):
        descriptor = int(path.name)
        if descriptor in (kept, nowhere):
            continue
        with suppress(OSError):  # that of the listing itself is closed by now
            replaced = nowhere
            only_reads = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if only_reads and stat.S_ISREG(os.fstat(descriptor).st_mode):
                replaced = os.open(path, os.O_RDONLY)
                os.lseek(replaced, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(replaced, descriptor)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook of the copy."""
    if event == "open":
        _, mode, flags = args
        writes = isinstance(mode, str) and not {*"wax+"}.isdisjoint(mode)
        if writes or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)):
            raise Refused(event)
    elif event.startswith(_REFUSED):
        raise Refused(event)


def _refuse_to_save(*_: Any, **__: Any) -> None:
    """In the place of `torch.save`, which opens its file without Python."""
    raise Refused("torch.save")
