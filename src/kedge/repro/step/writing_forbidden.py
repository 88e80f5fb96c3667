"""A process that the kernel lets write no file, and reach no other process.

# Note [Files that are opened without Python]
Python's audit events tell of what is opened by Python. The libraries of a program open files
themselves: `torch.save` and safetensors for a checkpoint, SQLite for a journal, Arrow for a table.
Landlock, which Linux has since 5.13, lets a process give up the right to do so, for good. A kernel
without it is left with a limit of zero on the size of files: then nothing is written, but a file
may still be created, or made empty.
"""

from __future__ import annotations

import ctypes
import resource

_NO_NEW_RIGHTS = 38
"""``PR_SET_NO_NEW_PRIVS``, without which nobody but root may restrict itself."""
_CREATE, _RESTRICT = 444, 446
"""The system calls ``landlock_create_ruleset`` and ``landlock_restrict_self``, on every machine."""
_ASK_FOR_VERSION = 1
_WRITE_FILE = 1 << 1
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_BIND_AND_CONNECT = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3


class _Ruleset(ctypes.Structure):
    """``struct landlock_ruleset_attr``: what is forbidden."""

    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


def forbid_writing(library: ctypes.CDLL) -> None:
    """Give up the right to change files, and to reach other processes; see the note.

    Args:
        library: The C library.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    version = library.syscall(_CREATE, None, ctypes.c_size_t(0), _ASK_FOR_VERSION)
    if version < 1:
        return
    ruleset = _ruleset(version)
    size = ctypes.c_size_t(ctypes.sizeof(ruleset))
    descriptor = library.syscall(_CREATE, ctypes.byref(ruleset), size, 0)
    library.prctl(_NO_NEW_RIGHTS, 1, 0, 0, 0)
    library.syscall(_RESTRICT, descriptor, 0)


def _ruleset(version: int) -> _Ruleset:
    """Return everything that a version of Landlock can forbid, but for reading."""
    ruleset = _Ruleset(files=_WRITE_FILE | _REMOVE_AND_MAKE)
    if version >= 2:
        ruleset.files |= _REFER
    if version >= 3:
        ruleset.files |= _TRUNCATE
    if version >= 4:
        ruleset.network = _BIND_AND_CONNECT
    if version >= 6:
        ruleset.scoped = _ABSTRACT_SOCKETS_AND_SIGNALS
    return ruleset
