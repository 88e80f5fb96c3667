"""File locks, which the operating system releases when the process ends."""

from __future__ import annotations

import errno
import os
import sys
import weakref
from contextlib import suppress
from io import FileIO
from typing import Literal, Protocol

if sys.platform != "win32":
    import fcntl

Answer = Literal["held", "refused", "unknown"]

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def claim(file: FileIO, *, alone: bool) -> Answer:
    """Lock a file, exclusively without waiting, or shared after waiting for the brief lock of an exclusive holder.

    Args:
        file: The file; closing it releases the lock.
        alone: Whether the lock is exclusive.

    Returns:
        "held"; "refused" if another process has a lock that excludes this one; "unknown" without support for locks.
    """
    if sys.platform == "win32":
        return "unknown"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return "unknown"
        if isinstance(error, BlockingIOError):
            return "refused"
        raise
    return "held"


class Closable(Protocol):
    """A file or a socket."""

    def close(self) -> None:
        """Close it."""


def leave_to_parent(file: Closable) -> None:
    """Close a file in every child forked from now on, because it belongs to this process."""
    _own.add(file)


def _let_go() -> None:
    """Called in a forked child: close the files of the parent, as far as the child has not closed what it inherited."""
    for file in list(_own):
        with suppress(OSError):
            file.close()


_own: weakref.WeakSet[Closable] = weakref.WeakSet()

if sys.platform != "win32":
    os.register_at_fork(after_in_child=_let_go)  # once: Python keeps such functions for ever
