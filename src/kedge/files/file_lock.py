"""File locks, which the operating system releases when the process ends."""

from __future__ import annotations

import errno
import sys
from contextlib import suppress
from functools import partial
from typing import Literal

from kedge.files.own_file import OwnFile

if sys.platform != "win32":
    import fcntl

Answer = Literal["held", "refused", "unknown"]

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def claim(file: OwnFile, *, alone: bool) -> Answer:
    """Lock a file, exclusively without waiting, or shared after waiting for the brief lock of an exclusive holder.

    Args:
        file: The file; closing it releases the lock.
        alone: Whether the lock is exclusive.

    Returns:
        "held"; "refused" if another process has a lock that excludes this one; "unknown" without
        support for locks.
    """
    if sys.platform == "win32":
        return "unknown"
    file.opened_again = partial(claim, alone=alone)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return "unknown"
        if isinstance(error, BlockingIOError):
            return "refused"
        raise
    return "held"


def release(file: OwnFile) -> None:
    """Release a lock.

    Closing the file is not enough: a child forked a moment ago may still have it open.
    """
    if not file.closed:
        with file, suppress(OSError):
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_UN)
