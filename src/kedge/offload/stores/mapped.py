"""Ranges of a file, mapped as tensors without a copy.

# Note [Mapped reads]
Each tensor has a map of its own, unmapped with the tensor's storage: no map ever moves, bytes read
count as the process's memory only as long as they are used, and no address space is reserved.
Maps are private, so a change in place by a backward function copies the page, and reaches neither
the file nor another map of the same range. Nothing writes through them: a full disk would be a
SIGBUS. MADV_POPULATE_READ brings in all pages at once, which is faster than one fault for every
few, and returns EFAULT where a fault would be a SIGBUS, so a disk that cannot be read is an error.

# Note [Maps and fork]
A private map shows later writes to the file. In a child process these would be the bytes that the
parent puts into the same range, after *its* tensor is freed. So before a fork Kedge makes every
page of every map the process's own (MADV_POPULATE_WRITE); there are hardly any maps then, unless
the fork is inside a backward pass.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_POPULATE_READ = 22  # Linux 5.14, <linux/mman.h>
_POPULATE_WRITE = 23
_NORESERVE = 0x4000

LIBC: Any = None
_maps: dict[int, int] = {}  # address -> length, of every live map

if os.name == "posix":
    LIBC = ctypes.CDLL(None, use_errno=True)
    LIBC.mmap.restype = ctypes.c_void_p
    LIBC.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@lru_cache(maxsize=1)
def can_map() -> bool:
    """Whether this system supports mapped reads."""
    if not sys.platform.startswith("linux") or LIBC is None:
        return False
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        start = ctypes.c_char.from_buffer(page)
        address = ctypes.addressof(start)
        able: bool = LIBC.madvise(address, mmap.PAGESIZE, _POPULATE_WRITE) == 0
        del start  # a map whose memory is exported cannot be closed
    return able


def map_range(file: int, offset: int, nbytes: int, released: Callable[[], None]) -> Tensor:
    """Return a private map of a file's range, as a uint8 tensor.

    Args:
        file: The descriptor.
        offset: Where the range begins, a multiple of the page size.
        nbytes: Its length; not zero.
        released: Called after the tensor's storage is freed, in the thread that drops its last
            reference.

    Raises:
        OSError: The range cannot be mapped, or not be read.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | _NORESERVE
    address = LIBC.mmap(None, nbytes, protection, flags, file, offset)
    if address == ctypes.c_void_p(-1).value:
        raise _error(ctypes.get_errno())
    if LIBC.madvise(address, nbytes, _POPULATE_READ):
        number = ctypes.get_errno()
        LIBC.munmap(address, nbytes)
        raise _error(number)
    _maps[address] = nbytes
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # At the interpreter's exit tensors may still be read, so nothing is unmapped there.
    weakref.finalize(memory, _unmap, address, nbytes, released).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _unmap(address: int, nbytes: int, released: Callable[[], None]) -> None:
    del _maps[address]
    LIBC.munmap(address, nbytes)
    released()


def _error(number: int) -> OSError:
    if number == errno.EFAULT:  # what madvise returns for a page that cannot be read
        number = errno.EIO
    return OSError(number, os.strerror(number))


def _own_all_pages() -> None:
    """Make every mapped page the process's own; called before a fork; see Note [Maps and fork]."""
    for address, nbytes in list(_maps.items()):
        LIBC.madvise(address, nbytes, _POPULATE_WRITE)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_own_all_pages)
