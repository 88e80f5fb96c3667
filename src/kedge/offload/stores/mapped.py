"""Ranges of a file as tensors, without a copy.

# Note [Mapped reads]
Each tensor has a map of its own, which goes with the tensor's storage: no map ever moves, what was
read counts as the process's memory only as long as it is used, and no address space is reserved.
Maps are private, so what a backward function changes in place is copied by page, and neither reaches the
file nor another map of the same range. They are never written through: a full disk would be a SIGBUS.
MADV_POPULATE_READ brings in all pages at once, which is faster than one fault for every few, and says
EFAULT where a fault would be a SIGBUS, so a disk that cannot be read is an error.

# Note [Maps and fork]
A private map shows what is written to the file later. In a child process that would be what the parent puts
in the same range, after *its* tensor is gone. So before a fork every page of every map is made the
process's own (MADV_POPULATE_WRITE); there are next to none then, unless the fork is inside a backward pass.
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

LIBC: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
_maps: dict[int, int] = {}  # address -> length, of every map that lives

if LIBC is not None:
    LIBC.mmap.restype = ctypes.c_void_p
    LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@lru_cache(maxsize=1)
def can_map() -> bool:
    """Whether this system has all that mapped reads need."""
    if not sys.platform.startswith("linux") or LIBC is None:
        return False
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        address = ctypes.addressof(start := ctypes.c_char.from_buffer(page))
        able: bool = LIBC.madvise(address, mmap.PAGESIZE, _POPULATE_WRITE) == 0
        del start  # a map whose memory is exported cannot be closed
    return able


def map_range(file: int, offset: int, nbytes: int, released: Callable[[], None]) -> Tensor:
    """Map a range of a file as a tensor of bytes.

    Args:
        file: The descriptor.
        offset: Where the range begins, a multiple of the page size.
        nbytes: Its length; not zero.
        released: Called when the tensor's storage is gone, by whichever thread lets go of it.

    Raises:
        OSError: The range cannot be mapped, or not be read.
    """
    address = LIBC.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _NORESERVE, file, offset)
    if address == ctypes.c_void_p(-1).value:
        raise _error()
    if LIBC.madvise(address, nbytes, _POPULATE_READ):
        failed = _error()
        LIBC.munmap(address, nbytes)
        raise failed
    _maps[address] = nbytes
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # At the interpreter's exit tensors may still be read, so nothing is unmapped there.
    weakref.finalize(memory, _unmap, address, nbytes, released).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _unmap(address: int, nbytes: int, released: Callable[[], None]) -> None:
    del _maps[address]
    LIBC.munmap(address, nbytes)
    released()


def _error() -> OSError:
    number = ctypes.get_errno()
    if number == errno.EFAULT:  # what madvise says for a page that cannot be read
        number = errno.EIO
    return OSError(number, os.strerror(number))


def _own_all_pages() -> None:
    """See Note [Maps and fork]."""
    for address, nbytes in list(_maps.items()):
        LIBC.madvise(address, nbytes, _POPULATE_WRITE)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_own_all_pages)
