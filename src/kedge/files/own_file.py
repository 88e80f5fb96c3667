"""Files that only Kedge uses, although it shares the numbers of open files with the program that it runs in.

# Note [Numbers of open files]
A program may close files that it did not open, as daemons do (`os.closerange(3, 256)`); its next
file gets the number. So every use of a number first compares the device and the inode behind it,
and a mark on the open file itself, because an inode is used again as well. The mark is the file's
owner (`F_SETOWN`), which has no effect on a file that sends no signals.

The numbers are high, beyond those that programs usually close, and the program's own files get the
numbers that they have without Kedge. Nothing is buffered here: the interpreter would write a buffer
to any file that has the number by then.

# Note [Forked processes]
A child process inherits the files, and closes them at once: a lock belongs to its parent alone, and
the room of a file without a name is free when its parent closes it.
"""

from __future__ import annotations

import errno
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, Self

if sys.platform != "win32":
    import fcntl
    import resource

HIGH = 2048
"""The least number of an open file, where the system allows it."""

_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_MAKING = os.O_CREAT | os.O_EXCL | os.O_TRUNC
APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | _BINARY
"""The flags of a file that is made if it is missing, and appended to."""
NEW = APPEND | os.O_EXCL
"""The flags of a file that must not exist."""

FRESH = APPEND | os.O_TRUNC
"""The flags of a file that is emptied first."""
OVER = os.O_WRONLY | os.O_CREAT | _BINARY
"""The flags of a file that is made if it is missing, and written again from its beginning."""


class Closable(Protocol):
    """A file or a socket."""

    def close(self) -> None:
        """Close it."""


_own: weakref.WeakSet[Closable] = weakref.WeakSet()


class DescriptorTaken(OSError):
    """The program has closed the number of a file of Kedge's, and the file cannot be opened again."""


class OwnDescriptor:
    """An open file that is never written to, read or closed under a number that the program has taken.

    Args:
        opened: The number, which this object closes. The file itself may get another one.
    """

    def __init__(self, opened: int) -> None:
        self._number, self._marked = -1, 0
        self._place = _place_of(os.fstat(opened))
        self._hold(opened)
        leave_to_parent(self)

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this process is a fork."""
        return self._number < 0

    def fileno(self) -> int:
        """Return the number, for one use at once.

        Raises:
            DescriptorTaken: It is the program's now.
            OSError: The file is closed.
        """
        self.check()
        return self._number

    def check(self) -> os.stat_result:
        """Return the state of the file; raises as `fileno`."""
        if self._number < 0:
            raise OSError(errno.EBADF, "it is closed")
        return self._own() or self._open_again()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._number >= 0 and self._own():
            os.close(self._number)
        self._number = -1

    def _hold(self, opened: int) -> None:
        self._number = _high(opened)
        self._marked = _mark(self._number)

    def _own(self) -> os.stat_result | None:
        """Return the state of the file; None if another one has the number, or none."""
        try:
            found = os.fstat(self._number)
        except OSError:
            return None
        same = _place_of(found) == self._place and _owner(self._number) == self._marked
        return found if same else None

    def _open_again(self) -> os.stat_result:
        raise DescriptorTaken(errno.EBADF, "the program has closed the file")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending() and hasattr(self, "_place"):
            self.close()


class OwnFile(OwnDescriptor):
    """A file with a path. If the program closes its number, the same file is opened again at its path.

    Args:
        path: The file.
        flags: How `os.open` opens it: `APPEND`, `NEW`, `FRESH` or `OVER`.

    Attributes:
        path: The absolute path.
        opened_again: Called with this object after the file was opened again, to lock it again.
    """

    def __init__(self, path: str | os.PathLike[str], flags: int = APPEND) -> None:
        self.path, self._flags = os.path.abspath(path), flags & ~_MAKING | _BINARY  # noqa: PTH100 - as in `program`
        self.opened_again: Callable[[OwnFile], object] = _nothing
        super().__init__(os.open(path, flags | _BINARY, 0o666))

    def write(self, content: memoryview) -> int:
        """Write the content, or a part of it; returns the number of bytes.

        Raises:
            OSError: The file has been removed; it would accept the content and lose it. Or the
                write fails.
        """
        if not self.check().st_nlink:
            raise OSError(errno.ESTALE, "it was removed while it was being written")
        return os.write(self._number, content)

    def overwrite(self, content: bytes) -> None:
        """Write a short content over the beginning of a file that was opened with `OVER`."""
        os.lseek(self.fileno(), 0, os.SEEK_SET)
        os.write(self._number, content)

    def cut(self, size: int) -> None:
        """Remove everything behind so many bytes."""
        os.ftruncate(self.fileno(), size)

    def _open_again(self) -> os.stat_result:
        try:
            again = (
                os.open(self.path, self._flags)
                if _place_of(os.stat(self.path)) == self._place  # noqa: PTH116
                else -1
            )
        except OSError:
            again = -1
        if again < 0:
            raise DescriptorTaken(
                errno.EBADF, "the program has closed the file, which is no longer at its path"
            )
        if _place_of(os.fstat(again)) != self._place:
            os.close(again)
            raise DescriptorTaken(
                errno.EBADF, "the program has closed the file, which was just replaced"
            )
        self._hold(again)
        self.opened_again(self)
        return os.fstat(self._number)


def write_all(file: OwnFile, content: bytes | bytearray | memoryview) -> None:
    """Write all of the content to a file, which may accept only a part at a time.

    Raises:
        OSError: See `OwnFile.write`.
    """
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def _nothing(_: OwnFile) -> None:
    return None


def _place_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def high_copy(opened: int) -> int:
    """Return another number of an open file, a high one if such are free; see Note [Numbers of open files]."""
    if sys.platform == "win32":
        return os.dup(opened)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    least = HIGH if allowed == resource.RLIM_INFINITY or allowed > HIGH * 2 else allowed // 2
    try:
        return fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, least)
    except OSError:
        return os.dup(opened)


def _high(opened: int) -> int:
    """Return another number of an open file, which is closed under the old one; the old one if no other is free."""
    try:
        number = high_copy(opened)
    except OSError:
        os.set_inheritable(opened, False)
        return opened
    os.close(opened)
    return number


def _mark(number: int) -> int:
    """Mark an open file, and return the mark; 0 if the system does not mark files."""
    if sys.platform != "win32":
        try:
            fcntl.fcntl(number, fcntl.F_SETOWN, os.getpid())
        except OSError:
            return 0
    return _owner(number)


def _owner(number: int) -> int:
    if sys.platform == "win32":
        return 0
    try:
        return fcntl.fcntl(number, fcntl.F_GETOWN)
    except OSError:
        return 0


def leave_to_parent(file: Closable) -> None:
    """Close a file in every child forked from now on; see Note [Forked processes]."""
    _own.add(file)


def _close_copies() -> None:
    """Called in a forked child: close its copies, as far as it has not closed what it inherited."""
    for each in list(_own):
        with suppress(OSError):
            each.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)  # once: Python keeps such functions for ever
