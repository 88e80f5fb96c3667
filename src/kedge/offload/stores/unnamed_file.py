"""Unnamed files, written front to back and freed whole; the system deletes them however the process ends.

# Note [Front to back]
Autograd frees what it has saved in a step together, so no account is kept of free places in a file:
each piece takes the room behind the last one. A `Filling` stands for all that is in the file. Only
what is in it holds that object: each piece, and each tensor that shows a piece's bytes. Once
nothing holds it, the file is written from its front again. So bytes are freed without a lock, by
any thread that drops a last reference, also by the garbage collector in the middle of a put.

# Note [Forked processes]
A child inherits the file, and the parent goes on using it. The child closes its descriptor at once
(`kedge.files.own_file`), so that the parent alone decides when the file's room is freed; the child
can neither read nor write what the parent saved.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kedge.errors import DiskFull, DiskIsMemory, StoreError, warn
from kedge.files.given_path import given_path
from kedge.files.own_file import DescriptorTaken, OwnDescriptor
from kedge.offload.stores.mapped import LIBC, can_map, map_range

PAGE = mmap.ALLOCATIONGRANULARITY
GROWTH = 64 << 20
"""The bytes by which a file grows, where its disk has room for them."""
LEAVE_OPEN = "let the program close only files that it has opened"

_PADDING = bytes(PAGE)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_WRITE_AND_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER

_warned: set[int] = set()  # devices for which the warning that they are memory was given

if hasattr(LIBC, "sync_file_range"):
    LIBC.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def pages(nbytes: int) -> int:
    """Return the size in bytes of the whole pages that so many bytes need; at least one page."""
    return max(1, -(-nbytes // PAGE)) * PAGE


def memory_of(data: Tensor) -> memoryview:
    """Return a view of a tensor's bytes, valid as long as the tensor lives."""
    nbytes = data.numel() * data.element_size()
    return memoryview((ctypes.c_ubyte * nbytes).from_address(data.data_ptr())).cast("B")


class Filling:
    """All that was put into a file since it was last written from its front; see Note [Front to back]."""

    __slots__ = ("__weakref__", "file")

    def __init__(self, file: UnnamedFile) -> None:
        self.file = file


class Piece:
    """A part of a file, for the bytes of one tensor.

    Attributes:
        filling: What keeps it; None once it is freed.
        start: Its offset in the file, a multiple of the page size.
        nbytes: The number of bytes.
        room: The bytes that it takes in the file: whole pages.
        number: The number of its put: 1 for the first, 2 for the next, ...
        out: Whether the system was asked to write it to the disk and drop it from memory.
    """

    __slots__ = ("filling", "nbytes", "number", "out", "room", "start")

    def __init__(self, filling: Filling, start: int, nbytes: int, number: int) -> None:
        self.filling: Filling | None = filling
        self.start = start
        self.nbytes = nbytes
        self.room = pages(nbytes)
        self.number = number
        self.out = False

    def leave_memory(self, filling: Filling) -> None:
        """Drop the pages that a read has brought back into memory, if the piece had left it."""
        if self.out:
            filling.file.advise(self, os.POSIX_FADV_DONTNEED)


class UnnamedFile(OwnDescriptor):
    """An unnamed file, which started programs do not inherit.

    Args:
        path: Its folder; None: the folder for temporary files.
        most: The bytes that it may have.

    Attributes:
        folder: Its folder.
        most: The bytes that it may have.
        size: The bytes that it has on its disk.

    Raises:
        StoreError: The folder does not exist, files cannot be made in it, or the system lacks
            ``pwritev``.
    """

    def __init__(self, path: str | os.PathLike[str] | None, most: int) -> None:
        if not hasattr(os, "pwritev"):
            raise StoreError(
                "saved tensors cannot go to disk on this system: "
                "it cannot write at an offset in a file"
            )
        if path is None:
            path = tempfile.gettempdir()
        self.folder = given_path(path)
        self.most = most
        self.size = 0
        self._end = 0
        self._filling: Callable[[], Filling | None] = _nothing

        if not self.folder.is_dir():
            raise StoreError(
                f"saved tensors cannot go to {self.folder}, which is not a folder; "
                "create it, or name another"
            )
        try:
            opened = _open(self.folder)
        except OSError as error:
            raise StoreError(
                f"saved tensors cannot go to {self.folder}, where no file can be created: "
                f"{error.strerror}; name a folder that you may write to"
            ) from error
        _warn_of_memory(self.folder)
        super().__init__(opened)

    @property
    def lost(self) -> bool:
        """Whether nothing in it can be read.

        This process is a fork, or the program has closed the file.
        """
        try:
            self.check()
        except OSError:
            return True
        return False

    @property
    def used(self) -> int:
        """The bytes of it that are taken."""
        if self._filling() is None:
            return 0
        return self._end

    def take(self, nbytes: int, number: int) -> Piece:
        """Take the room behind all that is in the file, for so many bytes.

        Raises:
            StoreError: The disk has no room.
        """
        filling = self._filling()
        if filling is None:
            filling = Filling(self)
            self._filling = weakref.ref(filling)
            self._end = 0

        piece = Piece(filling, self._end, nbytes, number)
        missing = self._end + piece.room - self.size
        if missing > 0:
            self._grow(missing)
        self._end += piece.room
        return piece

    def _grow(self, missing: int) -> None:
        try:
            self._reserve(max(missing, min(GROWTH, self.most - self.size)))
        except OSError:
            try:
                self._reserve(missing)
            except OSError as error:
                raise _refused(error, self.folder, missing) from error

    def _reserve(self, more: int) -> None:
        descriptor = self.fileno()
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, self.size, more)
            else:
                os.ftruncate(descriptor, self.size + more)  # a full disk then fails the write
        except OSError:
            os.ftruncate(self.fileno(), self.size)
            raise
        self.size += more

    def write(self, piece: Piece, memory: memoryview) -> None:
        """Write the bytes of a piece, padded to the end of its room.

        Raises:
            StoreError: They cannot be written.
        """
        # The system would have to read a partly written page from the disk first.
        padding = memoryview(_PADDING)[: piece.room - len(memory)]
        written = 0
        try:
            while written < len(memory):
                rest = [memory[written:], padding]
                written += os.pwritev(self.fileno(), rest, piece.start + written)
        except OSError as error:
            raise _refused(error, self.folder, piece.room) from error

    def read(self, piece: Piece, filling: Filling) -> Tensor:
        """Return the bytes of a piece as a uint8 tensor.

        It is a private map of the file where the system can, else a copy.

        Args:
            piece: The piece.
            filling: What keeps it, which a map holds as long as it exists.

        Raises:
            StoreError: They cannot be read.
        """
        if self.closed:
            raise StoreError(
                "a saved tensor on disk cannot be read in a process that was forked "
                "after it was saved; run forward and backward in the same process"
            )
        nbytes = piece.nbytes
        try:
            if can_map() and nbytes:
                released = partial(piece.leave_memory, filling)
                return map_range(self.fileno(), piece.start, nbytes, released)
            return self._copied(piece.start, nbytes)
        except OSError as error:
            advice = "name a folder on another disk, and run again"
            if isinstance(error, DescriptorTaken):
                advice = LEAVE_OPEN
            cause = error.strerror or str(error)
            raise StoreError(
                f"a saved tensor of {nbytes:,} bytes cannot be read back from {self.folder}: "
                f"{cause}; {advice}"
            ) from error

    def _copied(self, start: int, nbytes: int) -> Tensor:
        data = torch.empty(nbytes, dtype=torch.uint8)
        memory = memory_of(data)
        done = 0
        while done < nbytes:
            got = os.preadv(self.fileno(), [memory[done:]], start + done)
            if not got:
                raise OSError("the file ends too early")
            done += got
        return data

    def sync(self, piece: Piece) -> None:
        """Write a piece from the system's memory to the disk, and wait for it.

        Raises:
            OSError: The disk has failed.
        """
        if not hasattr(LIBC, "sync_file_range"):
            os.fdatasync(self.fileno())
        elif LIBC.sync_file_range(self.fileno(), piece.start, piece.room, _WRITE_AND_WAIT):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def advise(self, piece: Piece, advice: int) -> None:
        """Advise the system about a piece, unless the file is lost."""
        if not self.lost:
            os.posix_fadvise(self.fileno(), piece.start, piece.room, advice)


def _nothing() -> None:
    return None


def _open(folder: Path) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NO_UNNAMED:
                raise
    opened, name = tempfile.mkstemp(prefix="kedge-", dir=folder)
    Path(name).unlink()
    return opened


def _warn_of_memory(folder: Path) -> None:
    device = folder.stat().st_dev
    if device in _warned or filesystem(device) not in {"tmpfs", "ramfs"}:
        return
    _warned.add(device)
    warn(
        DiskIsMemory(
            f"saved tensors go to {folder}, which is a file system in memory, "
            "so this frees nothing; name a folder on a disk: kedge.Disk(path)"
        )
    )


def filesystem(device: int, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the type of the file system with a device number; None if unknown."""
    if not mounts.exists():
        return None
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        place, _, kind = line.partition(" - ")
        if place.split()[2] == number:
            return kind.split()[0]
    return None


def _refused(error: OSError, folder: Path, asked: int) -> StoreError:
    """Return the error to raise when a file in a folder cannot take so many more bytes."""
    cause = error.strerror or str(error)
    refused = f"saved tensors of {asked:,} bytes cannot be written in {folder}: {cause}"
    if isinstance(error, DescriptorTaken):
        return StoreError(f"{refused}; {LEAVE_OPEN}")
    if error.errno not in _FULL:
        return StoreError(f"{refused}; name another folder")

    disk = os.statvfs(folder)
    why = f"{disk.f_bavail * disk.f_frsize:,} bytes are free"
    if error.errno == errno.EFBIG:
        why = "the file would be larger than allowed (ulimit -f)"
    return DiskFull(
        f"saved tensors need {asked:,} more bytes in {folder}, where {why}: {cause}; "
        "make room, name another folder (kedge.Disk(path)), "
        "or offload fewer modules (where=...)"
    )
