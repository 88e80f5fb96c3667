"""Locks on files, which the operating system lets go of when the process is gone."""

from __future__ import annotations

import errno
import os
import sys
import weakref
from contextlib import suppress
from io import FileIO
from typing import Literal

if sys.platform != "win32":
    import fcntl

Answer = Literal["held", "refused", "unknown"]

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def claim(file: FileIO, *, alone: bool) -> Answer:
    """Lock a file, waiting for who is alone with it, who is so for a moment; but who wants to be alone does not wait.

    Args:
        file: The file; the lock ends with it.
        alone: Let nobody else have a lock on it.

    Returns:
        Whether it is "held", or "refused" as somebody else has it; "unknown" where there are no locks.
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


def leave_to_parent(file: FileIO) -> None:
    """Close a file in every child that is forked from now on: the lock belongs to this process."""
    mine = weakref.ref(file)
    os.register_at_fork(after_in_child=lambda: _let_go(mine()))


def _let_go(file: FileIO | None) -> None:
    """In a forked child: the lock is the parent's."""
    if file is not None:
        with suppress(OSError):  # the child may have closed all that it inherited
            file.close()
