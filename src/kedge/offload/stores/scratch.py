"""Unnamed files: the system deletes them however the process ends."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from kedge.errors import DiskFull, DiskIsMemory, StoreError, warn
from kedge.files.given_path import given_path
from kedge.files.own_file import DescriptorTaken, OwnDescriptor

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
LEAVE_OPEN = "let the program close only files that it has opened"

_warned: set[int] = set()  # devices for which the warning that they are memory was given


def open_scratch(path: str | os.PathLike[str] | None) -> tuple[OwnDescriptor, Path]:
    """Open a new unnamed file in a folder.

    Returns:
        The file, which started programs do not inherit, and the folder.

    Raises:
        StoreError: The folder does not exist, files cannot be made in it, or the system lacks
            ``pwritev``.
    """
    if not hasattr(os, "pwritev"):
        raise StoreError(
            "saved tensors cannot go to disk on this system: it cannot write at an offset in a file"
        )
    folder = given_path(tempfile.gettempdir() if path is None else path)
    if not folder.is_dir():
        raise StoreError(
            f"saved tensors cannot go to {folder}, which is not a folder; create it, or name another"
        )
    try:
        opened = _open(folder)
    except OSError as error:
        raise StoreError(
            f"saved tensors cannot go to {folder}, where no file can be created: {error.strerror}; name a folder "
            "that you may write to"
        ) from error
    _warn_of_memory(folder)
    return OwnDescriptor(opened), folder


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
            f"saved tensors go to {folder}, which is a file system in memory, so this frees nothing; name a folder "
            "on a disk: kedge.Disk(path)"
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


def refused(error: OSError, folder: Path, asked: int) -> StoreError:
    """Return the error to raise when a file in a folder cannot take so many more bytes."""
    cause = error.strerror or str(error)
    if isinstance(error, DescriptorTaken):
        return StoreError(
            f"saved tensors of {asked:,} bytes cannot be written in {folder}: {cause}; {LEAVE_OPEN}"
        )
    if error.errno not in _FULL:
        return StoreError(
            f"saved tensors of {asked:,} bytes cannot be written in {folder}: {cause}; name another folder"
        )
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    why = (
        "the file would be larger than allowed (ulimit -f)"
        if error.errno == errno.EFBIG
        else f"{free:,} bytes are free"
    )
    return DiskFull(
        f"saved tensors need {asked:,} more bytes in {folder}, where {why}: {cause}; make room, name another folder "
        "(kedge.Disk(path)), or offload fewer modules (where=...)"
    )
